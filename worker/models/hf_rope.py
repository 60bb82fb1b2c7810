"""hf_rope: RoPE settings of config.json, old (`rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from legato.worker.models.config import RopeConfig
from legato.worker.models.config_fields import ConfigFields

if TYPE_CHECKING:
    from collections.abc import Mapping

SUPPORTED_KINDS = ("default", "linear", "llama3")


def read_hf_rope(fields: ConfigFields, context_length: int) -> RopeConfig:
    """Reads what transformers 5 reads, in the same order of precedence.

    `rope_scaling` wins over `rope_parameters`; `rope_theta` inside them over the one beside them;
    `rope_type` over the older `type`. llama3's original length: the field beside wins, then the
    one inside, then the model's context length.
    """
    outer_theta = fields.number("rope_theta", 10000.0)
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    settings = fields.get(name) or {}
    if not isinstance(settings, dict):
        raise fields.error(name, f"must be an object, got {settings!r}")
    inner = ConfigFields(
        {f"{name}.{key}": value for key, value in settings.items()}, fields.where, f"{name}."
    )
    for place in (fields, inner):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "must be 1: partial RoPE is not supported")
    theta = inner.number("rope_theta", outer_theta)
    kind = _kind(inner, settings)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = inner.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)

    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    beside = "original_max_position_embeddings"
    inside = inner.integer(beside, context_length)
    original = fields.integer(beside, inside)
    if original < 1:
        raise inner.error(beside, f"must be at least 1, got {original}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=original,
    )


def _kind(
    inner: ConfigFields, settings: Mapping[str, object]
) -> Literal["default", "linear", "llama3"]:
    name = "rope_type" if "rope_type" in settings or "type" not in settings else "type"
    kind = settings.get(name, "default")
    if kind not in SUPPORTED_KINDS:
        raise inner.error(name, f"is {kind!r}; supported are {', '.join(SUPPORTED_KINDS)}")
    return cast("Literal['default', 'linear', 'llama3']", kind)
