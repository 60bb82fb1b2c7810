"""CompressedTensors: matrices as the compressed-tensors library stores them, integers only.

For each layer, in format "pack-quantized": `weight_packed` [N, K / f] int32 with f = 32 / bits
values in each, the lowest bits first, unsigned: the signed value plus 2^(bits - 1); in
"int-quantized": `weight` [N, K] int8. Then `weight_scale` [N, G] (group), [N, 1] (channel) or [1]
(tensor), and where it is asymmetric `weight_zero_point`, in pack-quantized packed along N.
w = scale * (q - zero), q and zero signed.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.models.config_fields import ConfigFields
from legato.worker.weights.quoting import bare, quoted
from legato.worker.weights.stored_matrix import (
    SCALE_DTYPES,
    Codes,
    check_width,
    nibbles,
    packed_words,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from legato.worker.weights.stored_matrix import Parts

_log = logging.getLogger(__name__)

PACKED, INTEGER = "pack-quantized", "int-quantized"
# A plain layer's parts; "weight" is one only beside a weight_scale.
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point")
_IN_ORDER, _OUT_OF_ORDER = ("weight", "static"), ("group", "dynamic")  # actorder
_SUPPORTED = f"supported are {PACKED} with 4 or 8 bits and {INTEGER} with 8"


@dataclass(frozen=True)
class CtLayout:
    """See `Layout`."""

    packed: bool
    bits: int
    strategy: str  # group, channel, tensor
    group_size: int | None
    symmetric: bool
    act_order: bool = False  # groups are of any inputs: weight_g_idx says which

    def shape(self, parts: Parts) -> tuple[int, int]:
        """See `Layout`."""
        rows, width = self._checked_values(parts)
        check_width(parts.stem, str(parts.tensors["weight_scale"].file), width)
        groups = self._num_groups(width)
        if self.strategy == "tensor":
            scale = parts.tensors["weight_scale"]
            shape: tuple[int, ...] = () if scale.shape == () else (1,)
        else:
            shape = (rows, groups)
        parts.require("weight_scale", SCALE_DTYPES, shape)
        if "weight_zero_point" in parts or not self.symmetric:
            zero = parts.tensors.get("weight_zero_point")
            if zero is not None and zero.dtype == "I32" and self.packed:
                shape = (-(-rows * self.bits // 32), groups)
            parts.require("weight_zero_point", ("I8", "I32") if self.packed else ("I8",), shape)
        if "weight_g_idx" in parts or (self.act_order and groups > 1):
            parts.require("weight_g_idx", ("I32", "I64"), (width,))
        return rows, width

    def read(self, parts: Parts) -> Codes:
        """See `Layout`."""
        rows, width = self.shape(parts)
        groups, middle = self._num_groups(width), 2 ** (self.bits - 1)
        if self.packed:
            declared = parts.read("weight_shape").tolist()
            if declared != [rows, width]:
                raise parts.error("weight_shape", f"holds {declared}, must hold {[rows, width]}")
            values = packed_words(parts.read("weight_packed"))
        else:
            values = parts.read("weight").view(torch.uint8) ^ 128  # adds 128 to a signed byte
        scales = parts.scales("weight_scale").reshape(-1, groups).expand(rows, groups)
        zeros = self._zeros(parts, rows, groups)
        group_size = self.group_size or width
        weight = QuantizedWeight(
            self.bits,
            width,
            group_size,
            values,
            scales.contiguous(),
            -scales * (zeros + float(middle)),
        )
        order = None
        if "weight_g_idx" in parts:
            order = parts.groups("weight_g_idx", width, group_size, groups)
        return Codes(weight, order)

    def _num_groups(self, width: int) -> int:
        return -(-width // (self.group_size or width))

    def _checked_values(self, parts: Parts) -> tuple[int, int]:
        if not self.packed:
            rows, width = parts.stored("weight", ("I8",)).shape
        else:
            rows, words = parts.stored("weight_packed", ("I32",)).shape
            width = words * (32 // self.bits)
            parts.require("weight_shape", ("I64", "I32"), (2,))
        if "weight_scale" not in parts:
            raise parts.error("weight_scale", "is missing from the checkpoint")
        return rows, width

    def _zeros(self, parts: Parts, rows: int, groups: int) -> Tensor:
        """Signed, [N, G] or what expands to it, fp32."""
        if "weight_zero_point" not in parts:
            return torch.zeros(1, 1)
        stored, middle = parts.read("weight_zero_point"), 2 ** (self.bits - 1)
        if stored.dtype == torch.int32:
            unsigned = packed_words(stored.t())
            if self.bits == 4:
                unsigned = nibbles(unsigned)
            return unsigned.t()[:rows].float().sub(middle)
        stored = stored.float()
        if bool(((stored < -middle) | (stored >= middle)).any()):
            raise parts.error(
                "weight_zero_point", f"holds a number outside [{-middle}, {middle - 1}]"
            )
        return stored.reshape(-1, groups)


@dataclass(frozen=True)
class CompressedTensors:
    """The layouts of a checkpoint, and which layers each of them is for."""

    schemes: tuple[tuple[tuple[str, ...], CtLayout], ...]  # (targets, layout)

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
        return cls(tuple(_scheme(fields, name, group, form) for name, group in groups.items()))

    def layout(self, stem: str) -> CtLayout | None:
        """That of layer `stem`: a scheme that names it goes before one for all Linear layers."""
        for named in (True, False):
            for targets, layout in self.schemes:
                if any(_matches(target, stem, named=named) for target in targets):
                    return layout
        return None


def _matches(target: str, stem: str, *, named: bool) -> bool:
    if not named:
        return target == "Linear"
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), stem) is not None
    return target == stem


def _scheme(
    fields: ConfigFields, name: str, group: object, form: str
) -> tuple[tuple[str, ...], CtLayout]:
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
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise scheme.error("targets", f"holds {quoted(target)}: {error}") from error
    return tuple(targets), layout


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
