"""Parking: sequences that leave the batch because they are about to move to another worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.scheduling.live import num_to_compute
from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from legato.worker.scheduling.decision import Decision
    from legato.worker.scheduling.live import LiveSequences
    from legato.worker.sequence import Sequence


class Parking:
    """A part of CapacityScheduler, on the same sequences.

    Only one of the batch is parked, whose prompt is computed: one that waits, or lies in the host's
    memory, is parked when it has come into the batch. A parked one keeps blocks and claim, and is
    no victim of preemption. Its rows are all there once the device is done with the steps that were
    under way, and it may turn out then that it has ended.
    """

    def __init__(self, live: LiveSequences) -> None:
        self._live = live
        self._wanted: dict[Sequence, int] = {}  # to be parked, for the move of that number
        # Parked, and not told of: the device is not done with that decision.
        self._unsettled: dict[Sequence, tuple[int, Decision | None]] = {}

    def want(self, sequence: Sequence, number: int) -> None:
        """To be parked as soon as that can be. Nothing of one that is out of the schedule."""
        if sequence.state is not SequenceState.DONE:
            self._wanted[sequence] = number

    def resume(self, sequence: Sequence) -> None:
        """It stays, or is back among those that wait for the batch."""
        self.forget(sequence)
        if sequence.state is SequenceState.PARKED:
            del self._live.parked[sequence]
            sequence.move_to(SequenceState.WAITING)
            self._live.waiting[sequence] = None

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants to know of it any more."""
        self._wanted.pop(sequence, None)
        self._unsettled.pop(sequence, None)

    def park(self) -> None:
        """To be called before a step is scheduled."""
        for sequence, number in list(self._wanted.items()):
            if (
                sequence.state is not SequenceState.RUNNING
                or sequence.ends_unread
                or num_to_compute(sequence)
            ):
                continue
            del self._wanted[sequence]
            del self._live.running[sequence]
            sequence.move_to(SequenceState.PARKED)
            self._live.parked[sequence] = None
            last = self._live.unsettled[-1] if self._live.unsettled else None
            self._unsettled[sequence] = number, last

    def take_parked(self) -> list[tuple[Sequence, int]]:
        """Those whose rows are all there by now, each once, and the numbers of their moves."""
        parked = [
            (sequence, number)
            for sequence, (number, last) in self._unsettled.items()
            if not any(decision is last for decision in self._live.unsettled)
        ]
        for sequence, _ in parked:
            del self._unsettled[sequence]
        return parked
