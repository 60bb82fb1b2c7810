"""PlainCopy and SharedRing: the limits of memory, by one thread and by two processes."""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_COUNTERS_BYTES = 4096
_TIMEOUT_S = 60.0


def pieces(num_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """Of a buffer, in order."""
    for start in range(0, num_bytes, piece_bytes):
        yield slice(start, min(start + piece_bytes, num_bytes))


class PlainCopy:
    """Memory to memory, a piece at a time: source and target are as large as a transfer."""

    def __init__(self, num_bytes: int, piece_bytes: int) -> None:
        self._source = np.full(num_bytes, 1, np.uint8)  # written: pages exist
        self._target = np.full(num_bytes, 2, np.uint8)
        self._pieces = list(pieces(num_bytes, piece_bytes))

    def seconds(self) -> float:
        """Of all bytes once."""
        started_s = time.perf_counter()
        for piece in self._pieces:
            np.copyto(self._target[piece], self._source[piece])
        return time.perf_counter() - started_s


class SharedRing:
    """Slots in memory that two processes map, and two counters before them: pieces copied in, and
    pieces copied out. Each waits for the other by yielding its core.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self._num_slots = num_slots
        self._counts = np.frombuffer(memory, np.uint64, 2)
        size = num_slots * slot_bytes
        slots = np.frombuffer(memory, np.uint8, size, _COUNTERS_BYTES)
        self._slots = slots.reshape(num_slots, slot_bytes)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> tuple[SharedRing, int]:
        """The ring and the descriptor of its memory, which is the caller's to close."""
        size = _COUNTERS_BYTES + num_slots * slot_bytes
        file = os.memfd_create("legato-bench")
        os.ftruncate(file, size)
        ring = cls(mmap.mmap(file, size), num_slots, slot_bytes)
        ring._slots.fill(0)
        return ring, file

    @classmethod
    def open(cls, path: str, num_slots: int, slot_bytes: int) -> SharedRing:
        """That of the other process."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(file, 0), num_slots, slot_bytes)
        finally:
            os.close(file)

    def copy_in(self, source: Bytes) -> None:
        """All of it; returns when the other process has copied the last piece out."""
        slot_bytes = self._slots.shape[1]
        first = int(self._counts[0])
        for number, piece in enumerate(pieces(len(source), slot_bytes), first):
            self._wait(1, number + 1 - self._num_slots)
            part = source[piece]
            np.copyto(self._slots[number % self._num_slots, : len(part)], part)
            self._counts[0] = number + 1
        self._wait(1, int(self._counts[0]))

    def copy_out(self, target: Bytes) -> None:
        """As many bytes as `target` has."""
        slot_bytes = self._slots.shape[1]
        first = int(self._counts[1])
        for number, piece in enumerate(pieces(len(target), slot_bytes), first):
            self._wait(0, number + 1)
            part = target[piece]
            np.copyto(part, self._slots[number % self._num_slots, : len(part)])
            self._counts[1] = number + 1

    def _wait(self, counter: int, at_least: int) -> None:
        give_up_s = time.monotonic() + _TIMEOUT_S
        while int(self._counts[counter]) < at_least:
            os.sched_yield()
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the other process copied nothing for {_TIMEOUT_S:g} s")
