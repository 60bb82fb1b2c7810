"""DrainMeter: how many tokens a second leave a queue while somebody has to wait in it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TIME_CONSTANT_S = 3.0  # of busy time: what was so long ago counts 1/e
LEAST_BUSY_S = 0.5  # a shorter time says nothing
FORGET_S = 30.0  # since somebody last had to wait


class DrainMeter:
    """A decaying mean over busy time alone: what leaves an empty queue tells of no limit.

    `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._is_busy = False
        self._counted_at = now()
        self._tokens = self._busy_s = self._idle_s = 0.0

    def set_busy(self, is_busy: bool) -> None:
        """Whether somebody waits from now on."""
        self._count()
        self._is_busy = is_busy

    def note(self, num_tokens: int) -> None:
        """So many left the queue; counted where others have to wait."""
        self._count()
        if self._is_busy:
            self._tokens += num_tokens

    def tokens_s(self) -> float | None:
        """Tokens a second; None: not measured of late."""
        self._count()
        return self._tokens / self._busy_s if self._busy_s >= LEAST_BUSY_S else None

    def _count(self) -> None:
        now = self._now()
        spent_s, self._counted_at = now - self._counted_at, now
        if self._is_busy:
            keep = math.exp(-spent_s / TIME_CONSTANT_S)
            self._tokens *= keep
            self._busy_s = self._busy_s * keep + TIME_CONSTANT_S * (1.0 - keep)
            self._idle_s = 0.0
        else:
            self._idle_s += spent_s
            if self._idle_s > FORGET_S:
                self._tokens = self._busy_s = 0.0
