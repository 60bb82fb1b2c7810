"""smallest_pools: the fewest workers of both pools that keep the targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WORKERS = 4096  # of a pool


def smallest_pools(meets: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """(prefill, decode) with the least sum; of several, with the fewest decode workers. None where
    MAX_WORKERS of each do not do.

    More workers of a pool never make it worse: `meets` is monotone in both.
    """
    if not meets(MAX_WORKERS, MAX_WORKERS):
        return None
    least_prefill = _least(lambda prefill: meets(prefill, MAX_WORKERS))
    decode = _least(lambda number: meets(MAX_WORKERS, number))
    best: tuple[int, int] | None = None
    # With more decode workers there may be fewer for prefill, but never fewer than with the most.
    while decode <= MAX_WORKERS and (best is None or least_prefill + decode < sum(best)):
        number = decode
        prefill = _least(lambda count, number=number: meets(count, number))  # type: ignore[misc]  # a default binds the loop's value
        if best is None or prefill + decode < sum(best):
            best = prefill, decode
        decode += 1
    return best


def _least(does: Callable[[int], bool]) -> int:
    """Of 1 … MAX_WORKERS, the last of which does."""
    high = 1
    while high < MAX_WORKERS and not does(high):
        high *= 2
    low, high = high // 2, min(high, MAX_WORKERS)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high
