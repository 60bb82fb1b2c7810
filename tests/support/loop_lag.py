"""LoopLag: how late an event loop came to its work, for tests that rest on limits of silence."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TICK_S = 0.05
# Two fifths of the shortest silence after which a peer is given up (2.5 s). A loop that was later
# has, on a machine with other work, kept its own side of a link silent: what failed meanwhile says
# nothing of the code.
TOO_LATE_S = 1.0


class LoopLag:
    """Of the loop in whose `loop_lag` block it is."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # when, and by how much; above the bound alone

    def note(self, at_s: float, late_s: float) -> None:
        if late_s > TOO_LATE_S:
            self._late.append((at_s, late_s))

    def was_late(self, since_s: float) -> bool:
        """Whether it was, at any time since `since_s` of time.monotonic."""
        return any(at_s >= since_s for at_s, _ in self._late)


@asynccontextmanager
async def loop_lag() -> AsyncIterator[LoopLag]:
    """Watches the running loop within the block."""
    lag = LoopLag()

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            lag.note(now_s, now_s - before_s - TICK_S)

    watching = asyncio.create_task(watch())
    try:
        yield lag
    finally:
        watching.cancel()
