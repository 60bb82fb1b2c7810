"""WaitingQueue: the router's queue in virtual time, by the router's own rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from legato.cluster.policies import Demand, may_pass, queue_rank
from legato.worker.priority import Priority
from legato.worker.scheduling.claim import NoRoomNowError

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.scheduling.claim import Newcomer


@dataclass(eq=False)
class Entry:
    """One that waits: a request, or an answer that was returned and keeps its place."""

    newcomer: Newcomer
    arrival: int
    arrived_s: float
    start: Callable[[], None]  # admits it or raises NoRoomNowError

    def rank(self, now: float) -> tuple[int, int]:
        """Its place in the order of the queue."""
        return queue_rank(
            batch=self.newcomer.priority is Priority.BATCH,
            waited_s=now - self.arrived_s,
            arrival=self.arrival,
        )

    @cached_property
    def demand(self) -> Demand:
        """As the rules want it."""
        each = self.newcomer.max_rows * self.newcomer.num_answers
        return Demand(prefill_tokens=self.newcomer.rows, decode_tokens=each)


class WaitingQueue:
    """Interactive before batch, first come first served, and small ones pass a blocked big one
    until that one has waited `max_passed_over_s`; then nothing passes it.
    """

    def __init__(self, max_passed_over_s: float) -> None:
        self.entries: list[Entry] = []
        self._max_passed_over_s = max_passed_over_s

    def first_interactive(self, now: float) -> Newcomer | None:
        """Whom batch work should make room for."""
        waiting = (e for e in self.entries if e.newcomer.priority is Priority.INTERACTIVE)
        first = min(waiting, key=lambda e: e.rank(now), default=None)
        return first.newcomer if first is not None else None

    def interactive(self, now: float) -> list[Newcomer]:
        """Those that a batch newcomer must not delay, the first first."""
        ordered = sorted(self.entries, key=lambda e: e.rank(now))
        return [e.newcomer for e in ordered if e.newcomer.priority is Priority.INTERACTIVE]

    def dispatch(self, now: float) -> None:
        """Starts every entry that may start now."""
        least: Demand | None = None  # of the blocked: who passes this passes each of them
        for entry in sorted(self.entries, key=lambda e: e.rank(now)):
            overdue = now - entry.arrived_s >= self._max_passed_over_s
            if least is not None and not may_pass(least, entry.demand):
                if overdue:
                    return
                continue
            self.entries.remove(entry)  # those behind must not count it as waiting
            try:
                entry.start()
            except NoRoomNowError:
                self.entries.append(entry)
                if overdue:
                    return
                least = _smaller(least, entry.demand)


def _smaller(blocked: Demand | None, demand: Demand) -> Demand:
    if blocked is None:
        return demand
    return Demand(
        prefill_tokens=min(blocked.prefill_tokens, demand.prefill_tokens),
        decode_tokens=min(blocked.decode_tokens, demand.decode_tokens),
    )
