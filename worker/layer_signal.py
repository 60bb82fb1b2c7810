"""LayerSignal: carries the progress of the engine's steps to those who wait for rows of KV."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from legato.worker.layer_reports import LayerReports
from legato.worker.scheduling.live import lease_of

if TYPE_CHECKING:
    import asyncio

    import torch

    from legato.worker.flight import Flight
    from legato.worker.kv.cache import KvShape
    from legato.worker.kv.progress import KvProgress
    from legato.worker.scheduling.step import Step

# More than a pipe holds.
_READ_BYTES = 1 << 20


class LayerSignal:
    """A forward pass runs in C, or on a device's queue, and cannot call the event loop: it writes
    a number to memory and a byte to a pipe. The pipe is there from `open` on: where a worker has
    no file left to open, requests under way must not be what finds out.
    """

    def __init__(
        self, shape: KvShape, device: torch.device, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._bytes_per_row = shape.bytes_per_row
        self._device = device
        self._loop = loop
        self._listeners: set[KvProgress] = set()
        self._pipe: tuple[int, int] | None = None  # to read, to write

    # Called on the event loop.

    def open(self) -> None:
        """Once, before the first `add`. Raises OSError."""
        assert self._pipe is None, "opened twice"
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._loop.add_reader(self._pipe[0], self._on_wake)

    def add(self, progress: KvProgress) -> None:
        """It is told from now on, before its sequence's first step."""
        assert self._pipe is not None, "not open"
        self._listeners.add(progress)

    def discard(self, progress: KvProgress) -> None:
        """Nobody waits for it any more."""
        self._listeners.discard(progress)

    def close(self) -> None:
        """No step runs any more."""
        if self._pipe is not None:
            self._loop.remove_reader(self._pipe[0])
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _on_wake(self) -> None:
        assert self._pipe is not None, "woken without a pipe"
        os.read(self._pipe[0], _READ_BYTES)
        for progress in self._listeners:
            progress.tell()

    # Called on the engine's thread.

    def begin(
        self, step: Step, before: Flight | None
    ) -> tuple[LayerReports | None, list[KvProgress]]:
        """Just before a step is launched: where its layers are reported, and whose rows it writes.

        `before` is the step that is still under way. Rows that were found in the prefix cache may
        be of its making.
        """
        if self._pipe is None:
            return None, []
        parts = [part for part in step.parts if part.sequence.progress is not None]
        if not parts:
            return None, []
        num_tokens = sum(part.num_tokens for part in parts)
        reports = LayerReports(num_tokens * self._bytes_per_row, self._pipe[1], self._device)
        watched = []
        for part in parts:
            sequence, progress = part.sequence, part.sequence.progress
            assert progress is not None, "taken for one with progress"
            if progress.lease is None:
                progress.lease = lease_of(sequence)
                if before is None:
                    progress.found(sequence.num_computed)
                else:
                    progress.begin(sequence.num_computed, before.reports)
                    before.watched.append(progress)
            progress.begin(part.num_tokens, reports)
            watched.append(progress)
        return reports, watched

    def end(self, flight: Flight) -> None:
        """All rows that a step computes are there."""
        for progress in flight.watched:
            progress.end()
        if flight.watched:
            assert self._pipe is not None, "a progress that was not added"
            with suppress(BlockingIOError):  # full: it has been woken often enough
                os.write(self._pipe[1], b"\0")
