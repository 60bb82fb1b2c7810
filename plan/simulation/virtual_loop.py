"""VirtualLoop: an event loop whose clock jumps to the next timer, and so never waits."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StandstillError(RuntimeError):
    """Somebody waits, and nothing is left that could happen."""


class _NoSockets(selectors.SelectSelector):
    """Where the loop would wait for sockets, time passes."""

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandstillError("everybody waits, and no timer is set")
        self._passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines of the product as they are, one after the other and always in the same order.

    It serves no socket and no other thread. Its clock starts at 0.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_NoSockets(self._pass))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def _pass(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)
