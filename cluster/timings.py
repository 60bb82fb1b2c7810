"""PhaseClock: where one answer's time went, in phases that follow each other without a gap."""

from __future__ import annotations

import copy
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.protos import generation_pb2


class Phase(Enum):
    """The six phases of `Timings`, in the order of an answer that is never moved."""

    QUEUE = "queue_s"
    TICKET = "ticket_s"
    PREFILL = "prefill_s"
    HANDOFF = "handoff_s"
    DECODE = "decode_s"
    DELIVERY = "delivery_s"


class PhaseClock:
    """An answer is in exactly one phase at any moment; a phase may be entered again.

    `now` is a monotonic clock in seconds. The first phase is QUEUE, from construction.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = self._entered = now()
        self._phase = Phase.QUEUE
        self._spent_s = dict.fromkeys(Phase, 0.0)
        self._ttft_s: float | None = None
        self.closed = False  # the figures are told

    def copy(self) -> PhaseClock:
        """Another that has had the same phases until now."""
        twin = copy.copy(self)
        twin._spent_s = dict(self._spent_s)
        return twin

    @property
    def phase(self) -> Phase:
        """The phase that runs."""
        return self._phase

    @property
    def in_phase_s(self) -> float:
        """Seconds since it began."""
        return self._now() - self._entered

    def enter(self, phase: Phase) -> None:
        """Ends the running phase and begins `phase` at the same instant."""
        now = self._now()
        self._spent_s[self._phase] += now - self._entered
        self._phase, self._entered = phase, now

    def mark_first_token(self) -> float | None:
        """The first token is being handed to gRPC; its TTFT. Later calls do and return nothing."""
        if self._ttft_s is not None:
            return None
        self._ttft_s = self._now() - self._started
        return self._ttft_s

    def write_to(self, timings: generation_pb2.Timings) -> None:
        """Closes the running phase and fills phases, total and TTFT.

        The total is the sum of the six values as written, so that they agree to the last bit.
        """
        self.enter(self._phase)
        self.closed = True
        total_s = 0.0
        for phase, spent_s in self._spent_s.items():
            setattr(timings, phase.value, spent_s)
            total_s += spent_s
        timings.total_s = total_s
        timings.ttft_s = self._ttft_s if self._ttft_s is not None else 0.0
