"""StopSignal: the signals by which the owner of a service is told to end it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class StopSignal:
    """Counts Ctrl-C, SIGTERM and SIGHUP: one asks for the end, a second for haste."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Takes the signals over; again after ray.init, which sets handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class StartInterruptedError(Exception):
    """A signal came while the service was starting."""
