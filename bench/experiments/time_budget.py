"""TimeBudget: how long an experiment may measure, and which sizes and rounds fit into that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_GROWTH = 2.5  # the next size takes so much longer: it is twice as large, and attends to more
_LEAST_ROUNDS = 2  # that must fit beside the warm-up of a size


class TimeBudget:
    """Counts from its construction."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._now = now
        self._ends_s = now() + seconds

    @property
    def left_s(self) -> float:
        """0 when it is over."""
        return max(0.0, self._ends_s - self._now())

    def part(self, share: float) -> TimeBudget:
        """So much of what is left."""
        return TimeBudget(self.left_s * share, self._now)

    def rounds(self, most: int) -> Iterator[int]:
        """Round numbers: while another one that takes as long as the longest so far fits in. The
        first one is begun while any time is left.
        """
        longest_s = 0.0
        for number in range(most):
            began_s, left_s = self._now(), self.left_s
            if left_s <= 0 or left_s < longest_s:
                return
            yield number
            longest_s = max(longest_s, self._now() - began_s)

    def fitting(self, sizes: Sequence[int], warm_up: Callable[[int], None]) -> list[int]:
        """Runs each size once, from small to large, and returns those for which rounds will fit in:
        the first two in any case, while any time is left.
        """
        done: list[int] = []
        all_s = 0.0
        for size in sizes:
            if self.left_s <= 0:
                break
            began_s = self._now()
            warm_up(size)
            took_s = self._now() - began_s
            all_s += took_s
            done.append(size)
            next_s = _GROWTH * took_s
            if len(done) >= 2 and next_s + _LEAST_ROUNDS * (all_s + next_s) > self.left_s:
                break
        return done
