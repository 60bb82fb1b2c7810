"""BenchProgress: how far a load is, on standard error where that is a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from legato.bench.load.sample import Sample
    from legato.bench.load.workload import LoadWorkload


class BenchProgress:
    """A bar of requests, or of seconds where the load ends by time; and what is under way."""

    def __init__(self, workload: LoadWorkload, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._total_s: float | None = None
        warmup, total = workload.warmup, None
        if workload.num_requests is not None:
            total = None if warmup.seconds else workload.num_requests + warmup.num_requests
        elif workload.duration_s is not None:
            self._total_s = None if warmup.num_requests else workload.duration_s + warmup.seconds
        elif workload.trace is not None:
            total = len(workload.trace)
        self._task = self._progress.add_task("asking", total=total or self._total_s)
        self._began_s: float | None = None
        self._under_way = self._num_ended = self._num_failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def take(self, sample: Sample) -> None:
        """A request that was sent, or that has ended."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        if sample.ended_s is None:
            self._under_way += 1
        else:
            self._under_way -= 1
            self._num_ended += 1
            self._num_failed += not sample.ok
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        phase = "warm-up" if sample.is_warmup else "measured"
        done: float = self._num_ended
        if self._total_s is not None:
            done = min(self._total_s, time.monotonic() - self._began_s)
        self._progress.update(
            self._task,
            completed=done,
            description=f"{phase}: {self._under_way} under way, {self._num_ended} ended{failed}",
        )
