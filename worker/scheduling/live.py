"""LiveSequences: the sequences of a decode worker's engine, by where they stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.scheduling.claim import Claim, Newcomer
    from legato.worker.scheduling.decision import Decision
    from legato.worker.sequence import Sequence


@dataclass(frozen=True)
class Swapped:
    """One that was preempted and will come back."""

    slots: list[int]  # of the host's memory, in the order of the sequence's blocks
    since: float


@dataclass
class LiveSequences:
    """Dicts, for order and for quick removal from the middle."""

    # Their KV is here, or they compute it here.
    waiting: dict[Sequence, None] = field(default_factory=dict)
    running: dict[Sequence, None] = field(default_factory=dict)
    swapped: dict[Sequence, Swapped] = field(default_factory=dict)
    parked: dict[Sequence, None] = field(default_factory=dict)  # out of the batch, to be moved
    # Of all those: rows of their prompts are still to be computed.
    prompts: dict[Sequence, None] = field(default_factory=dict)
    wanted: list[Newcomer] = field(default_factory=list)  # wait to be admitted, the first first
    unsettled: list[Decision] = field(default_factory=list)  # the device is not done with them


def rank(sequence: Sequence) -> tuple[int, int]:
    """The lesser goes first and yields last: priority, then arrival."""
    return (-claim_of(sequence).priority, sequence.arrival)


def claim_of(sequence: Sequence) -> Claim:
    """Of a sequence in the scheduler, which has one."""
    assert sequence.claim is not None, "not admitted"
    return sequence.claim


def lease_of(sequence: Sequence) -> BlockLease:
    """Of a sequence in the scheduler, which has one."""
    assert sequence.lease is not None, "scheduled without blocks"
    return sequence.lease


def num_to_compute(sequence: Sequence) -> int:
    """Rows of the prompt that are computed here, and not yet; 0 of a sequence that decodes.

    The claim stands for all rows of the prompt from the beginning; then it grows with those there.
    """
    return claim_of(sequence).rows - sequence.num_computed


def needs_block(sequence: Sequence, block_size: int) -> bool:
    """Whether its blocks have no place for the next row."""
    return sequence.num_computed == len(lease_of(sequence).blocks) * block_size
