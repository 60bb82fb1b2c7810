"""DrainClock: how long running requests have, once the service ends; the newest word counts."""

from __future__ import annotations

import asyncio
import time


class DrainClock:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._until_s: float | None = None  # on the monotonic clock
        self._moved = asyncio.Event()

    @property
    def left_s(self) -> float | None:
        """Seconds; None before the end has begun."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def give(self, seconds: float) -> None:
        """So many from now on, in the place of what was said before."""
        self._until_s = time.monotonic() + seconds
        self._moved.set()

    async def over(self, idle: asyncio.Event) -> None:
        """Returns when `idle` is set or the time is over."""
        while not idle.is_set() and (left_s := self.left_s):
            self._moved.clear()
            waits = {asyncio.create_task(event.wait()) for event in (idle, self._moved)}
            try:
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
