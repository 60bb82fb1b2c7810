"""CompressedTensors: which layers of a checkpoint the library of that name packed, and how."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.models.config_fields import ConfigFields
from legato.worker.weights.ct_layout import CtLayout
from legato.worker.weights.name_pattern import MAX_PATTERNS, NamePattern
from legato.worker.weights.quoting import bare, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping


_log = logging.getLogger(__name__)

PACKED, INTEGER = "pack-quantized", "int-quantized"
# A plain layer's parts; "weight" is one only beside a weight_scale.
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point")
_IN_ORDER, _OUT_OF_ORDER = ("weight", "static"), ("group", "dynamic")  # actorder
MAX_SCHEMES = 16  # each may have targets up to their limit
_PATTERN = "re:"  # begins a target that is a regular expression
_SUPPORTED = f"supported are {PACKED} with 4 or 8 bits and {INTEGER} with 8"


@dataclass(frozen=True)
class CompressedTensors:
    """The layouts of a checkpoint, and which layers each of them is for."""

    schemes: tuple[CtScheme, ...]
    where: str  # names the settings in errors

    @classmethod
    def from_config(cls, fields: ConfigFields) -> CompressedTensors:
        """Reads a quantization_config.

        Raises:
            CheckpointError: a setting that is not served.
        """
        status = fields.text("quantization_status", "compressed")
        if status != "compressed":
            raise fields.error(
                "quantization_status", f"is {quoted(status)}; supported is compressed"
            )
        for name in ("kv_cache_scheme", "transform_config"):
            if fields.get(name):
                raise fields.error(name, "is set, which is not supported")
        sparsity = fields.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise fields.error(
                "sparsity_config.format", f"is {quoted(sparsity['format'])}; supported is dense"
            )
        form = fields.text("format", PACKED)
        groups = fields.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise fields.error("config_groups", "must be an object with at least one scheme")
        if len(groups) > MAX_SCHEMES:
            raise fields.error("config_groups", f"has {len(groups)}, at most {MAX_SCHEMES}")
        schemes = tuple(_scheme(fields, name, group, form) for name, group in groups.items())
        return cls(schemes, fields.where)

    def layout(self, stem: str) -> CtLayout | None:
        """That of layer `stem`: a scheme that names it goes before one for all Linear layers."""
        for scheme in self.schemes:
            if scheme.names_layer(stem):
                return scheme.layout
        return next((scheme.layout for scheme in self.schemes if scheme.all_linear), None)


@dataclass(frozen=True)
class CtScheme:
    """One of config_groups."""

    names: frozenset[str]
    patterns: tuple[NamePattern, ...]
    layout: CtLayout

    @property
    def all_linear(self) -> bool:
        """Whether it is for every linear layer that no other names."""
        return "Linear" in self.names

    def names_layer(self, stem: str) -> bool:
        """By its name or a pattern."""
        return stem in self.names or any(p.matches(stem) for p in self.patterns)


def _scheme(fields: ConfigFields, name: str, group: object, form: str) -> CtScheme:
    where = f"{fields.where}: config_groups.{bare(name)}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise fields.error(f"config_groups.{bare(name)}", "must be an object with weights")
    scheme = ConfigFields(group, where)
    weights: Mapping[str, object] = group["weights"]
    layout = _layout(ConfigFields(weights, f"{where}.weights"), scheme, form)
    if scheme.get("output_activations"):
        raise scheme.error("output_activations", "are quantised, which is not supported")
    if scheme.get("input_activations"):
        _log.warning("%s.input_activations: activations are not quantised here", where)
    targets = scheme.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise scheme.error("targets", f"must be a list of names, got {quoted(targets)}")
    if len(targets) > MAX_PATTERNS:
        raise scheme.error("targets", f"has {len(targets)} entries, at most {MAX_PATTERNS}")
    patterns = []
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                patterns.append(NamePattern(target.removeprefix(_PATTERN)))
            except ValueError as error:
                raise scheme.error("targets", f"holds {quoted(target)}: {error}") from error
    names = frozenset(target for target in targets if not target.startswith(_PATTERN))
    return CtScheme(names, tuple(patterns), layout)


def _layout(weights: ConfigFields, scheme: ConfigFields, form: str) -> CtLayout:
    form = scheme.text("format", form)
    kind = weights.text("type", "int")
    if kind != "int":
        raise weights.error("type", f"is {quoted(kind)}; supported is int")
    bits = weights.integer("num_bits", 8)
    # naive-quantized is the older name of the same layout.
    packed = form == PACKED
    if form not in (PACKED, INTEGER, "naive-quantized"):
        raise scheme.error("format", f"is {quoted(form)}; {_SUPPORTED}")
    if bits != 8 and not (packed and bits == 4):
        raise weights.error("num_bits", f"is {bits}; {_SUPPORTED}")
    if weights.boolean("dynamic", default=False):
        raise weights.error("dynamic", "is true; supported is false")
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", default)
    if strategy not in ("group", "channel", "tensor"):
        raise weights.error(
            "strategy", f"is {quoted(strategy)}; supported are group, channel, tensor"
        )
    group_size = weights.integer("group_size") if strategy == "group" else None
    if group_size is not None and (group_size < 8 or group_size % 8):
        raise weights.error("group_size", f"is {group_size}; must be a multiple of 8")
    return CtLayout(
        packed,
        bits,
        strategy,
        group_size,
        weights.boolean("symmetric", default=True),
        _act_order(weights),
    )


def _act_order(weights: ConfigFields) -> bool:
    """Whether inputs are grouped by their activations; "weight" only means quantised in that order.

    An early version wrote true for "group".
    """
    order = weights.get("actorder")
    if order not in (None, False, True, *_IN_ORDER, *_OUT_OF_ORDER):
        known = ", ".join((*_IN_ORDER, *_OUT_OF_ORDER))
        raise weights.error("actorder", f"is {quoted(order)}; supported are {known}")
    return order is True or order in _OUT_OF_ORDER
