"""counter_rng: random numbers that are a function of (seed, index), with no state to keep."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniform(seed: int, index: int) -> float:
    """The number in (0, 1] at place `index` of the stream that `seed` names.

    SplitMix64 (Steele, Lea and Flood 2014) started at a mixed seed and advanced `index` + 1 times,
    which its counter form does in one step. Plain integers: the same on every device and machine.

    Args:
        seed: in [0, 2^64).
        index: >= 0.
    """
    word = _mix(_mix((seed + _GOLDEN) & _MASK) + (index + 1) * _GOLDEN & _MASK)
    return ((word >> 11) + 1) / (1 << 53)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """`uniform` of tensors of one shape: int64, of which the seeds' bits are an unsigned number.

    Returns:
        fp64, on their device; int64 arithmetic wraps around, so the bits are those of `uniform`.
    """
    words = _mix_tensor(_mix_tensor(seeds + _signed(_GOLDEN)) + (indices + 1) * _signed(_GOLDEN))
    return (_shifted(words, 11) + 1).to(torch.float64) / (1 << 53)


def signed_seed(seed: int) -> int:
    """The int64 with the bits of a seed in [0, 2^64)."""
    return _signed(seed)


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _FACTORS[0] & _MASK
    word = (word ^ (word >> 27)) * _FACTORS[1] & _MASK
    return word ^ (word >> 31)


def _mix_tensor(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(_FACTORS[0])
    words = (words ^ _shifted(words, 27)) * _signed(_FACTORS[1])
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros: torch's own shift of int64 repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
