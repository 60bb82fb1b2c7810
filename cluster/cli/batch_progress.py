"""BatchProgress: how far a batch is, on standard error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

QUIET_PERIOD_S = 10.0  # between two lines where there is no terminal


class BatchProgress:
    """A bar where there is a terminal; else a line now and then."""

    def __init__(
        self, total: int, done: int, num_failed: int, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total, self._done, self._num_failed = total, done, num_failed
        self._num_tokens = 0
        self._started_s = self._told_s = time.monotonic()
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, note="")

    def __enter__(self) -> Self:
        if self._done:
            was = "line was" if self._total == 1 else "lines were"
            self.tell(f"{self._done} of {self._total} {was} done before")
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def line(self, *, failed: bool, num_tokens: int) -> None:
        """One more is finished."""
        self._done += 1
        self._num_failed += failed
        self._num_tokens += num_tokens
        self._bar.update(self._task, completed=self._done, note=self._note())
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._told_s >= QUIET_PERIOD_S:
            self._told_s = now_s
            self.tell(f"{self._done} of {self._total} lines, {self._note()}")

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _note(self) -> str:
        seconds = max(1e-3, time.monotonic() - self._started_s)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._num_tokens / seconds:,.0f} tokens/s{failed}"
