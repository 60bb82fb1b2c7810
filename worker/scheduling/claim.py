"""Claim: one sequence's hold on the KV pool; and what is asked before it gets one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from legato.worker.priority import Priority


class AdmissionMode(Enum):
    """What a newcomer must find room for."""

    EXPECTED = "expected"  # its prompt and its expected answer
    RESERVE = "reserve"  # its prompt and max_tokens, promised: nobody is ever preempted


@dataclass(frozen=True)
class AdmissionRule:
    """`risk`: the share of answers that may turn out longer than expected."""

    mode: AdmissionMode = AdmissionMode.EXPECTED
    risk: float = 0.7
    max_preemptions: int = 3  # one preempted so often is expected to need all it may need

    def __post_init__(self) -> None:
        if not 0 <= self.risk < 1:
            raise ValueError(f"risk must be in [0, 1), got {self.risk}")
        if self.max_preemptions < 1:
            raise ValueError(f"max_preemptions must be at least 1, got {self.max_preemptions}")


@dataclass(frozen=True)
class Newcomer:
    """What a request asks for. `max_rows` - `max_tokens` rows are there before the first token."""

    rows: int  # of KV that will be handed over
    max_rows: int
    max_tokens: int
    priority: Priority = Priority.INTERACTIVE
    num_preemptions: int = 0  # it was here before, and was returned
    num_answers: int = 1  # that share the full blocks of `rows`

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= self.max_rows:
            raise ValueError(f"rows must be in [1, max_rows {self.max_rows}], got {self.rows}")
        if not 1 <= self.max_tokens <= self.max_rows + 1:
            raise ValueError(
                f"max_tokens must be in [1, max_rows + 1 = {self.max_rows + 1}], "
                f"got {self.max_tokens}"
            )
        if self.num_answers < 1:
            raise ValueError(f"num_answers must be at least 1, got {self.num_answers}")


@dataclass(eq=False)
class Claim:
    """One sequence's hold on the pool, from its admission to its end.

    Changed by the ledger, and by the scheduler that runs the sequence.
    """

    priority: Priority
    rows: int  # of KV, there or on their way
    max_rows: int
    max_tokens: int
    num_preemptions: int
    own_blocks: int  # bound or promised for it alone: what its end gives back
    num_shared_blocks: int  # that others may refer to as well: not given back at its end
    promised: int  # of its own, those that the pool has yet to give
    swapped: bool = False
    withdrawn: bool = False


class NeverFitsError(Exception):
    """More blocks than the pool has."""


class NoRoomNowError(Exception):
    """Not beside those that are there at present."""
