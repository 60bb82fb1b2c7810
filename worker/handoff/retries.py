"""Retries: what the links to one receiver leave to the next one, where they broke."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.handoff.shared_memory import SenderMemory

_log = logging.getLogger(__name__)
# Before the link after one over which rows have landed; twice as long after each that moved none.
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0
# What the receiver says may be new each time.
_MOST_REASONS = 16


class Retries:
    """Of one address and worker. No I/O; used on the event loop."""

    def __init__(self, new_memory: Callable[[int, int], SenderMemory] | None) -> None:
        """`new_memory` as of LinkParts."""
        self._new_memory = new_memory
        self._memory: SenderMemory | None = None
        self._pause_s = FIRST_PAUSE_S / 2
        self._not_before_s = float("-inf")
        self._reasons: set[str] = set()
        self._is_closed = False

    def wait_s(self, now_s: float) -> float:
        """So long until the next link may begin; 0: now."""
        return max(0.0, self._not_before_s - now_s)

    def broke(self, now_s: float, *, moved_rows: bool) -> None:
        """A link has, over which rows have landed or not."""
        self._pause_s = FIRST_PAUSE_S if moved_rows else min(2 * self._pause_s, MOST_PAUSE_S)
        self._not_before_s = now_s + self._pause_s

    def log(self, level: int, text: str) -> None:
        """Once, however often it is tried."""
        if text not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(text)
            _log.log(level, "%s", text)

    def take_memory(self, num_slots: int, slot_bytes: int) -> SenderMemory | None:
        """That of a link that broke, or new; None: rows go by gRPC alone. Clearing as much for each
        try would cost more than the tries.

        Raises:
            MemoryRefusedError: there is none to be had.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            return memory
        return self._new_memory(num_slots, slot_bytes) if self._new_memory is not None else None

    def refuse_memory(self) -> None:
        """The receiver does not take any: none is offered again."""
        self._new_memory = None

    def keep_memory(self, memory: SenderMemory) -> None:
        """Of a link that broke; nobody of this worker uses it any more. A receiver that does reads
        rows that are damaged then.
        """
        if self._memory is not None or self._is_closed:
            memory.close()
        else:
            self._memory = memory

    def close(self) -> None:
        """No link comes after it."""
        self._is_closed = True
        if self._memory is not None:
            self._memory.close()
            self._memory = None
