"""gguf_rope: the RoPE settings in a GGUF file's metadata as a RopeConfig."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legato.worker.models.config import RopeConfig
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.models.config_fields import ConfigFields

KINDS = ("none", "linear", "yarn")
ORIGINAL = "rope.scaling.original_context_length"
# What the converter writes into rope_freqs.weight depends on these two, which it does not
# write; they are the same in every Llama 3.1, 3.2 and 3.3.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT_LENGTH = 8192
# Factors of YaRN that are 1 in every file whose settings came from a config.json.
_FIXED_FACTORS = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)
_UNSUPPORTED = ("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha")


def read_gguf_rope(
    fields: ConfigFields,
    head_dim: int,
    context_length: int,
    *,
    theta: float | None = 10000.0,
    rope_freqs: Sequence[float] | None = None,
) -> RopeConfig:
    """Reads `rope.*`.

    Args:
        fields: those of the architecture.
        head_dim: all of which is rotated.
        context_length: the default for YaRN's original length.
        theta: where the file has no rope.freq_base; None: it must have it.
        rope_freqs: the contents of rope_freqs.weight, where there is one: llama3's scaling.

    Raises:
        CheckpointError: a setting is malformed or not served.
    """
    theta = fields.number("rope.freq_base", theta)
    # An early name of linear scaling, before there was a type.
    old_factor = fields.number("rope.scale_linear", 1.0)
    kind = fields.text("rope.scaling.type", "none" if old_factor == 1.0 else "linear")
    if kind not in KINDS:
        raise fields.error(
            "rope.scaling.type", f"is {quoted(kind)}; supported are {', '.join(KINDS)}"
        )
    for name in _FIXED_FACTORS:
        if fields.number(name, 1.0) != 1.0:
            raise fields.error(name, "must be 1, other values are not supported")
    for name in _UNSUPPORTED:
        if fields.get(name) not in (None, 0):
            raise fields.error(name, f"is {quoted(fields.get(name))}, which is not supported")
    if kind != "none" and rope_freqs is not None:
        raise fields.error("rope.scaling.type", f"is {kind} beside a tensor rope_freqs.weight")
    factor = fields.number("rope.scaling.factor", old_factor)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return _yarn(fields, theta, context_length)
    if factor != 1.0:
        raise fields.error("rope.scaling.factor", f"is {factor} without rope.scaling.type")
    if rope_freqs is None:
        return RopeConfig(theta=theta)
    if len(rope_freqs) != head_dim // 2:
        raise CheckpointError(
            f"{fields.where}: tensor rope_freqs.weight has {len(rope_freqs)} numbers, a head "
            f"of {head_dim} needs {head_dim // 2}"
        )
    if max(rope_freqs, default=1.0) == 1.0:
        return RopeConfig(theta=theta)
    return _llama3(fields, theta, head_dim, rope_freqs)


def _yarn(fields: ConfigFields, theta: float, context_length: int) -> RopeConfig:
    if theta == 1.0:
        raise fields.error("rope.freq_base", "must not be 1 with yarn")
    factor = fields.number("rope.scaling.factor")
    original = fields.integer(ORIGINAL, context_length)
    if original < 1:
        raise fields.error(ORIGINAL, f"must be at least 1, got {original}")
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    if fast < slow:
        raise fields.error(
            "rope.scaling.yarn_beta_fast", f"{fast} must not be below yarn_beta_slow {slow}"
        )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0,
    )


def _llama3(
    fields: ConfigFields, theta: float, head_dim: int, rope_freqs: Sequence[float]
) -> RopeConfig:
    """Finds the llama3 settings that rope_freqs.weight was made from."""
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=max(rope_freqs),
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
        original_context_length=fields.integer(ORIGINAL, LLAMA3_ORIGINAL_CONTEXT_LENGTH),
    )
    expected = llama3_divisors(rope, head_dim)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, rope_freqs, strict=True)):
        raise CheckpointError(
            f"{fields.where}: tensor rope_freqs.weight does not follow the llama3 rule with "
            f"factor {rope.factor:g} and original length {rope.original_context_length}, the only "
            "one supported"
        )
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What llama3 scaling divides each of the head_dim / 2 RoPE frequencies by.

    Long waves are stretched by `factor`, short ones not at all; between the two limits the
    frequency is interpolated (Llama 3.1's rule).
    """
    low, high = rope.low_freq_factor, rope.high_freq_factor
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * pair / head_dim)
        turns = rope.original_context_length / wavelength
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / rope.factor + kept))
    return divisors
