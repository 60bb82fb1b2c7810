"""Rotation: which of several routers a client asks next."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

SHUNNED_S = 5.0  # after a failure a router is asked only where no other is left


class Rotation:
    """New requests go to the routers in turn. Thread-safe; `now` is a monotonic clock, seconds."""

    def __init__(
        self, targets: Sequence[str], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.targets = tuple(targets)
        self._now = now
        self._lock = threading.Lock()
        self._next = 0
        self._shunned_until_s: dict[str, float] = {}

    def pick(self, tried: Collection[str] = ()) -> str:
        """The next: one that was not tried, of those one that has not failed of late."""
        with self._lock:
            first = self._next
            self._next = (first + 1) % len(self.targets)
            now_s = self._now()
            turns = [*self.targets[first:], *self.targets[:first]]
            return min(
                turns, key=lambda t: (t in tried, self._shunned_until_s.get(t, now_s) > now_s)
            )

    def failed(self, target: str) -> None:
        """It was not to be reached, or is going."""
        with self._lock:
            self._shunned_until_s[target] = self._now() + SHUNNED_S

    def answered(self, target: str) -> None:
        """It serves."""
        with self._lock:
            self._shunned_until_s.pop(target, None)
