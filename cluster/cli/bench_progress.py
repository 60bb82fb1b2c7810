"""BenchProgress: how far a load is, on standard error where that is a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from legato.bench.load.sample import Sample


class BenchProgress:
    """Counts what was sent and what has ended. Without a total the bar only moves."""

    def __init__(self, total: int | None) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("requests", total=total)
        self._under_way = self._num_failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def take(self, sample: Sample) -> None:
        """A request that was sent, or that has ended."""
        if sample.ended_s is None:
            self._under_way += 1
        else:
            self._under_way -= 1
            self._num_failed += not sample.ok
            self._progress.advance(self._task)
        text = f"requests: {self._under_way} under way"
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, description=text + failed)
