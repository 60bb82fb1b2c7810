"""TerminalProgress: what a start is doing, with the seconds it has taken, on standard error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.status import Status


class TerminalProgress:
    """A line for every step; what is waited for spins below it where there is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._started_s = time.monotonic()
        self._status: Status | None = None
        self._state = ""

    def stage(self, text: str) -> None:
        """See `legato.cluster.owner.Progress`."""
        self._console.print(f"{self._elapsed()} {text}", markup=False, soft_wrap=True)

    def state(self, text: str) -> None:
        """See `legato.cluster.owner.Progress`."""
        if not self._console.is_terminal:
            if text != self._state:
                self.stage(text)
        elif self._status is None:
            self._status = self._console.status(self._plain(text))
            self._status.start()
        else:
            self._status.update(self._plain(text))
        self._state = text

    def close(self) -> None:
        """Takes the spinner away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._started_s:5.1f} s]"

    def _plain(self, text: str) -> str:
        from rich.markup import escape

        return escape(f"{self._elapsed()} {text}")
