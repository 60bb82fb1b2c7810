"""FlowMeter: how many tokens a second pass a point, while somebody waits there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SPAN = 32.0
LEAST_COUNT = 8.0  # fewer say nothing
FORGET_S = 30.0  # since somebody last waited


class FlowMeter:
    """A mean over the last SPAN or so that passed, and over the time in which somebody waited:
    what leaves an empty queue tells of no limit. Time in which nobody passes counts at once.

    By number and not by time, for one that passes a second says as much as twenty do in a second
    elsewhere. `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._keep = 1.0 - 1.0 / SPAN
        self._is_waited = False
        self._advanced_at = now()
        self._tokens = self._batch_tokens = self._count = self._waited_s = 0.0
        self._open_s = 0.0  # waited since the last one passed
        self._idle_s = 0.0

    def set_waited(self, is_waited: bool) -> None:
        """Whether somebody waits from now on."""
        self._advance()
        self._is_waited = is_waited

    def note(self, num_tokens: int, *, batch: bool = False) -> None:
        """So many passed; counted where others wait."""
        self._advance()
        if not self._is_waited:
            return
        keep = self._keep
        self._tokens = keep * self._tokens + num_tokens
        self._batch_tokens = keep * self._batch_tokens + (num_tokens if batch else 0)
        self._count = keep * self._count + 1.0
        self._waited_s = keep * self._waited_s + self._open_s
        self._open_s = 0.0

    def tokens_s(self) -> float | None:
        """Tokens a second; None: not measured of late."""
        return self._rate(self._tokens)

    def batch_tokens_s(self) -> float | None:
        """Of these, those of batch requests."""
        return self._rate(self._batch_tokens)

    def _rate(self, tokens: float) -> float | None:
        self._advance()
        waited_s = self._waited_s + self._open_s
        return tokens / waited_s if self._count >= LEAST_COUNT and waited_s else None

    def _advance(self) -> None:
        now = self._now()
        spent_s, self._advanced_at = now - self._advanced_at, now
        if self._is_waited:
            self._open_s += spent_s
            self._idle_s = 0.0
            return
        self._idle_s += spent_s
        if self._idle_s > FORGET_S:
            self._tokens = self._batch_tokens = self._count = self._waited_s = self._open_s = 0.0
