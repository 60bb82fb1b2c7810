"""DecodeScheduler: which sequences take part in the next decode step."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from legato.worker.sequence import Sequence


class DecodeScheduler:
    """Every joined sequence takes part in every step, up to `max_batch_size`.

    There is no preemption: the blocks for all rows that a sequence may ever need were promised
    with its ticket, so a running sequence cannot run out of room. Those beyond the batch size
    wait for a place, first come, first served.
    """

    def __init__(self, block_size: int, max_batch_size: int) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self._block_size = block_size
        self._max_batch_size = max_batch_size
        self._waiting: deque[Sequence] = deque()
        # A dict, for order and for quick removal from the middle.
        self._running: dict[Sequence, None] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """0: prompts are not computed here."""
        return 0

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence whose KV has landed: all but its last token's."""
        assert sequence.num_computed == len(sequence.token_ids) - 1
        assert sequence.lease is not None
        rows = sequence.num_prompt_tokens + sequence.params.max_tokens - 1
        assert rows <= len(sequence.lease.blocks) * self._block_size, "the ticket is too small"
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence, in the batch or waiting for it."""
        if sequence.state is SequenceState.DONE:
            return
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence]
        sequence.move_to(SequenceState.DONE)

    def schedule(self) -> Step | None:
        """One new token for each sequence of the batch, newcomers included.

        A sequence whose last token is on its way takes no part.
        """
        joined: list[Sequence] = []
        room = self._max_batch_size - len(self._running)
        for sequence in list(islice(self._waiting, room)):
            self._waiting.popleft()
            sequence.move_to(SequenceState.RUNNING)
            self._running[sequence] = None
            joined.append(sequence)
        parts = [StepPart(sequence, 1) for sequence in self._running if not sequence.ends_unread]
        return Step(parts, joined) if parts else None

    def commit(self, step: Step) -> None:
        """Notes the row of KV that each sequence gained."""
        for part in step.parts:
            part.sequence.num_computed += 1
