"""Step: what one forward pass computes, and the contract that both schedulers keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from legato.worker.sequence import Sequence


@dataclass(frozen=True)
class StepPart:
    """`num_tokens` new tokens of one sequence, the first being number `sequence.num_computed`."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether these reach the sequence's last token, so that a next one can be sampled."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_known_or_unread


@dataclass(frozen=True)
class Step:
    """The parts, in batch order."""

    parts: list[StepPart]

    @property
    def num_tokens(self) -> int:
        """New tokens over all parts."""
        return sum(part.num_tokens for part in self.parts)


class Scheduler(Protocol):
    """Decides what runs next. Pure: no tensor, no socket, no clock. Used by one thread."""

    @property
    def num_waiting(self) -> int:
        """Sequences that no step has included yet."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that steps include now."""
        ...

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens taken in and not yet computed."""
        ...

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is in the host's memory."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Sequences that had to yield their blocks, so far."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in, behind those that came before."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Takes it out wherever it stands; does nothing if it is out already."""
        ...

    def schedule(self, now: float) -> Step | None:
        """The next step, or None where nothing can run now. `now`: seconds on a steady clock."""
        ...

    def commit(self, step: Step) -> None:
        """Notes that `step` is computed, or certainly will be. Called before its sampled tokens
        are appended.
        """
        ...

    def settle(self, step: Step) -> None:
        """Notes that the device is done with `step`. Called once for each, in order, when the next
        may have been committed, and before its sampled tokens are appended.
        """
        ...
