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
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    raise ValueError(f"rope.kind must be default, linear or llama3, got {rope.kind!r}")


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
