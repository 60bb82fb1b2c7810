"""DrainMeter: how many tokens a second leave a queue while somebody has to wait in it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# So little says nothing: what fills empty workers all at once leaves them all at once as well.
LEAST_BUSY_S, LEAST_COUNT = 0.5, 8.0
LONG_BUSY_SHARE = 0.8  # of the time constant: then few tell enough, the drain is slow
FORGET_S = 30.0  # since somebody last had to wait


class DrainMeter:
    """A decaying mean over busy time alone: what leaves an empty queue tells of no limit.

    `now` is a monotonic clock in seconds.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, time_constant_s: float = 3.0
    ) -> None:
        """What was `time_constant_s` of busy time ago counts 1/e."""
        self._now = now
        self._time_constant_s = time_constant_s
        self._is_busy = False
        self._counted_at = now()
        self._tokens = self._count = self._busy_s = self._idle_s = 0.0

    def set_busy(self, is_busy: bool) -> None:
        """Whether somebody waits from now on."""
        self._advance()
        self._is_busy = is_busy

    def note(self, num_tokens: int) -> None:
        """So many left the queue; counted where others have to wait."""
        self._advance()
        if self._is_busy:
            self._tokens += num_tokens
            self._count += 1.0

    def tokens_s(self) -> float | None:
        """Tokens a second; None: not measured of late."""
        self._advance()
        enough = self._busy_s >= LEAST_BUSY_S and (
            self._count >= LEAST_COUNT or self._busy_s >= LONG_BUSY_SHARE * self._time_constant_s
        )
        return self._tokens / self._busy_s if enough else None

    def _advance(self) -> None:
        now = self._now()
        spent_s, self._counted_at = now - self._counted_at, now
        if self._is_busy:
            keep = math.exp(-spent_s / self._time_constant_s)
            self._tokens *= keep
            self._count *= keep
            self._busy_s = self._busy_s * keep + self._time_constant_s * (1.0 - keep)
            self._idle_s = 0.0
        else:
            self._idle_s += spent_s
            if self._idle_s > FORGET_S:
                self._tokens = self._count = self._busy_s = 0.0
