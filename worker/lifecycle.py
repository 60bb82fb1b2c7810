"""Lifecycle: the worker's phase, and which calls are under way."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Phase(Enum):
    """What the worker does at present; it only moves forward."""

    STARTING = auto()
    READY = auto()
    DRAINING = auto()  # no new work; running work finishes
    DEAD = auto()  # the engine failed, or the worker has stopped

    def can_become(self, target: Phase) -> bool:
        """Whether `target` may follow."""
        return target.value > self.value


class NotReadyError(Exception):
    """New work is not taken in this phase."""


class Lifecycle:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def move_to(self, target: Phase) -> None:
        """Changes the phase; does nothing where it is there or beyond already."""
        if self.phase.can_become(target):
            self.phase = target

    @property
    def num_calls(self) -> int:
        """Prefill and Decode calls under way."""
        return self._num_calls

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around a call that holds blocks; raises NotReadyError where no new work is taken."""
        if self.phase is not Phase.READY:
            raise NotReadyError(f"the worker is {self.phase.name.lower()} and takes no new work")
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once no call is under way; False where some are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
