"""TimeBudget: how long an experiment may measure, and which sizes and rounds fit into that."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_GROWTH = 2.5  # the next size takes so much longer: it is twice as large, and attends to more
_LEAST_S = 1e-3  # left for another round
_LEAST_ROUNDS = 2  # that must fit beside the warm-up of a size


class TimeBudget:
    """Counts from its construction. `whole`: what it is a part of."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        whole: TimeBudget | None = None,
    ) -> None:
        self.seconds = seconds
        self._now = now
        self._ends_s = now() + seconds
        self._whole = whole

    @property
    def left_s(self) -> float:
        """0 when it is over."""
        return max(0.0, self._ends_s - self._now())

    @property
    def is_over(self) -> bool:
        """True when as much time again has gone by."""
        return self._now() >= self._ends_s + self.seconds

    def part(self, share: float) -> TimeBudget:
        """So much of what is left."""
        return TimeBudget(self.left_s * share, self._now, self)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What happens within takes none of the time: a model is loaded, a service starts."""
        began_s = self._now()
        try:
            yield
        finally:
            self._extend(self._now() - began_s)

    def _extend(self, seconds: float) -> None:
        self._ends_s += seconds
        if self._whole is not None:
            self._whole._extend(seconds)

    def rounds(self, most: int) -> Iterator[int]:
        """Round numbers: while another one that takes as long as the longest so far fits in. The
        first one may be late by as much as the whole time: without it there is no verdict.
        """
        longest_s = 0.0
        for number in range(most):
            began_s = self._now()
            late = self.left_s < max(longest_s, _LEAST_S) if number else self.is_over
            if late:
                return
            yield number
            longest_s = max(longest_s, self._now() - began_s)

    def fitting(self, sizes: Sequence[int], run: Callable[[int], None], least: int) -> list[int]:
        """Runs each size, from small to large, and returns those for which rounds will fit in: so
        many of the first in any case, as far as the time goes. The smallest is run twice: the first
        time has more to do.
        """
        done: list[int] = []
        all_s = 0.0
        for size in sizes:
            if self.left_s <= 0:
                break
            if not done:
                run(size)
            began_s = self._now()
            run(size)
            took_s = self._now() - began_s
            all_s += took_s
            done.append(size)
            next_s = _GROWTH * took_s
            if len(done) >= least and next_s + _LEAST_ROUNDS * (all_s + next_s) > self.left_s:
                break
        return done
