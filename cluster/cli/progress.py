"""TerminalProgress: what a start is doing, with the seconds it has taken, on standard error."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from rich.console import Console

from legato.cluster.cli.status_table import size_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.status import Status

BAR_CELLS = 20
PLAIN_STEP_PERCENT = 25  # of a download, where there is no terminal: a line for so much
PLAIN_PERIOD_S = 10.0  # and of weights a line for so long
_WEIGHTS = re.compile(r"weights (\d{1,3}) %")


class TerminalProgress:
    """A line for every step; what is waited for spins below it where there is a terminal, with bars
    for what has a measure. Elsewhere it is a line too, and how far it has come only now and then.
    """

    def __init__(
        self, console: Console | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._now = now
        self._started_s = now()
        self._status: Status | None = None
        self._state = ""  # where there is no terminal: as it was shown last
        self._shown_s = now()

    def stage(self, text: str) -> None:
        """See `legato.cluster.owner.Progress`."""
        self._console.print(f"{self._elapsed()} {text}", markup=False, soft_wrap=True)

    def state(self, text: str) -> None:
        """See `legato.cluster.owner.Progress`."""
        if not self._console.is_terminal:
            self._plain_state(text)
        else:
            self._spin(_WEIGHTS.sub(lambda found: f"weights {bar(int(found[1]))}", text))

    def _plain_state(self, text: str) -> None:
        is_new = _WEIGHTS.sub("weights", text) != _WEIGHTS.sub("weights", self._state)
        is_due = self._now() - self._shown_s >= PLAIN_PERIOD_S
        if is_new or (is_due and text != self._state):
            self.stage(text)
            self._state, self._shown_s = text, self._now()

    def amount(self, text: str, done: int, total: int) -> None:
        """See `legato.cluster.owner.Progress`."""
        percent = min(100, 100 * done // total) if total > 0 else 0
        if not self._console.is_terminal:
            step = percent // PLAIN_STEP_PERCENT * PLAIN_STEP_PERCENT
            self.state(f"{text}: {step} % of {size_words(total)}")
        else:
            self._spin(f"{text} {bar(percent)} of {size_words(total)}")

    def close(self) -> None:
        """Takes the spinner away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _spin(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status(self._plain(text))
            self._status.start()
        else:
            self._status.update(self._plain(text))

    def _elapsed(self) -> str:
        return f"[{self._now() - self._started_s:5.1f} s]"

    def _plain(self, text: str) -> str:
        from rich.markup import escape

        return escape(f"{self._elapsed()} {text}")


def bar(percent: int) -> str:
    """`██████████░░░░░░░░░░ 50 %`."""
    cells = BAR_CELLS * min(100, percent) // 100
    return f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {percent:3d} %"
