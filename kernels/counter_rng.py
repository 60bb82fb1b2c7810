"""counter_rng: random numbers that are a function of (seed, index), with no state to keep."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment


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


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
