"""counter_rng's uniform, inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def uniform(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64, of which the seed's bits are an unsigned number, to fp64; see kernels.counter_rng."""
    word = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    word = _mix(word + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return ((word >> 11) + 1).to(tl.int64).to(tl.float64) / 9007199254740992.0


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)
