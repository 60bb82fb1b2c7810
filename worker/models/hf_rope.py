"""hf_rope: RoPE settings of config.json, old (`rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, get_args

from legato.worker.models.config import RopeConfig, RopeKind
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.worker.models.config_fields import ConfigFields

SUPPORTED_KINDS = get_args(RopeKind)
ORIGINAL = "original_max_position_embeddings"


def read_hf_rope(
    fields: ConfigFields, context_length: int, *, default_theta: float = 10000.0
) -> RopeConfig:
    """Reads what transformers 5 reads, in the same order of precedence.

    `rope_scaling` wins over `rope_parameters`; `rope_theta` inside them over the one beside them;
    `rope_type` over the older `type`. The original length of llama3 and yarn: the field beside
    wins, then the one inside, then the model's context length.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    settings = rope_object(fields, name)
    theta = fields.number("rope_theta", default_theta)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "must be 1: partial RoPE is not supported")
    outer_original = None if fields.get(ORIGINAL) is None else fields.integer(ORIGINAL)
    return read_rope_object(
        fields, name, settings, context_length, theta, outer_original=outer_original
    )


def rope_object(fields: ConfigFields, name: str) -> dict[str, object]:
    """The object in a field; empty where there is none."""
    settings = fields.get(name) or {}
    if not isinstance(settings, dict):
        raise fields.error(name, f"must be an object, got {quoted(settings)}")
    return settings


def read_rope_object(
    fields: ConfigFields,
    name: str,
    settings: Mapping[str, object],
    context_length: int,
    default_theta: float,
    *,
    outer_original: int | None = None,
) -> RopeConfig:
    """The RoPE that the object `settings`, found in the config as `name`, describes."""
    inner = fields.inside(name, settings)
    if inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise inner.error("partial_rotary_factor", "must be 1: partial RoPE is not supported")
    theta = inner.number("rope_theta", default_theta)
    kind = _kind(inner, settings)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=inner.number("factor"))
    original = inner.integer(ORIGINAL, context_length) if outer_original is None else outer_original
    if original < 1:
        raise inner.error(ORIGINAL, f"must be at least 1, got {original}")
    if kind == "yarn":
        return _yarn(inner, theta, original, context_length)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=original,
    )


def _yarn(inner: ConfigFields, theta: float, original: int, context_length: int) -> RopeConfig:
    """A null factor is the ratio of the two lengths; a zero counts as absent (transformers)."""
    if theta == 1.0:
        raise inner.error("rope_theta", "must not be 1 with yarn")
    factor = inner.number("factor", context_length / original)
    fast, slow = _number_or(inner, "beta_fast", 32.0), _number_or(inner, "beta_slow", 1.0)
    if fast < slow:
        raise inner.error("beta_fast", f"{fast} must not be below beta_slow {slow}")
    mscale, all_dim = _number_or(inner, "mscale", 0.0), _number_or(inner, "mscale_all_dim", 0.0)
    if mscale and all_dim:
        inferred = _temperature(factor, mscale) / _temperature(factor, all_dim)
    else:
        inferred = _temperature(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=inner.boolean("truncate", default=True),
        attention_factor=inner.number("attention_factor", inferred),
    )


def _temperature(factor: float, mscale: float) -> float:
    """YaRN's factor of cos and sin (its equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _number_or(inner: ConfigFields, name: str, default: float) -> float:
    return default if inner.get(name) == 0 else inner.number(name, default)


def _kind(inner: ConfigFields, settings: Mapping[str, object]) -> RopeKind:
    name = "rope_type" if "rope_type" in settings or "type" not in settings else "type"
    kind = settings.get(name, "default")
    if kind not in SUPPORTED_KINDS:
        raise inner.error(name, f"is {quoted(kind)}; supported are {', '.join(SUPPORTED_KINDS)}")
    return cast("RopeKind", kind)
