"""RoPE's inverse frequencies for every kind of scaling that is served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32 on the CPU, with transformers' arithmetic.

    Raises:
        ValueError: the kind is unknown.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = rope.theta**exponents
    plain = 1.0 / periods
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
        return 1.0 / (rope.factor * periods) * (1 - kept) + plain * kept
    raise ValueError(f"rope.kind must be default, linear, llama3 or yarn, got {rope.kind!r}")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies are slowed by `factor`, high ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    longest_kept = rope.original_context_length / rope.high_freq_factor
    shortest_slowed = rope.original_context_length / rope.low_freq_factor
    keep = (rope.original_context_length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - keep) * plain / rope.factor + keep * plain
    slowed_or_blended = torch.where(wavelengths > shortest_slowed, plain / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, plain, slowed_or_blended)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2]: 0 where a pair keeps its frequency, 1 where it is slowed by `factor`.

    It rises between the pairs that turn `beta_fast` and `beta_slow` times over the original
    context (YaRN, arXiv 2309.00071).
    """

    def pair_that_turns(turns: float) -> float:
        length = rope.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return ((pairs - low) / (high - low)).clamp(0, 1)
