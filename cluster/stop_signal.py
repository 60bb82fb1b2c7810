"""StopSignal: the signals by which the owner of a service is told to end it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Counts Ctrl-C, SIGTERM and SIGHUP: one asks for the end, a second for haste.

    Within `with` the signals are its own.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = [signal.getsignal(number) for number in NUMBERS]
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(NUMBERS, self._before, strict=True):
            signal.signal(number, handler)

    def install(self) -> None:
        """Takes the signals over; again after ray.init, which sets handlers of its own."""
        for number in NUMBERS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class StartInterruptedError(Exception):
    """A signal came while the service was starting."""
