"""Placement policies: pure rules over frozen snapshots; no clock, no socket, no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Prompt tokens that may lie uncomputed at one prefill worker: two chunks of the default size keep
# it busy, and what waits longer waits in the router's queue, where it can still be dropped,
# reordered or sent elsewhere.
PREFILL_BACKLOG_TOKENS = 4096
# A batch request that has waited this long takes its place by arrival among the interactive ones,
# so that a steady stream of those cannot keep it out for ever.
BATCH_AGEING_S = 10.0


@dataclass(frozen=True)
class Demand:
    """What one attempt at a request needs."""

    prefill_tokens: int  # prompt, and what was emitted so far when the request is moved
    decode_tokens: int  # rows of KV at the end; 0 where the answer ends in prefill
    batch: bool = False
    avoid: frozenset[str] = frozenset()  # ids of workers that failed it: chosen only without others


@dataclass(frozen=True)
class WorkerSnapshot:
    """One placeable worker: its capacity, and what the router has given out of it."""

    worker_id: str
    block_size: int
    total_blocks: int
    free_blocks: int
    backlog_tokens: int = 0  # prompt tokens sent and not yet computed (prefill)
    full: bool = False  # it refused a request and has not reported since

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` rows."""
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """True where the whole worker is large enough."""
        return self.blocks_for(num_tokens) <= self.total_blocks

    def can_hold_now(self, num_tokens: int) -> bool:
        """True where the free blocks are enough."""
        return not self.full and self.blocks_for(num_tokens) <= self.free_blocks


def pick_prefill(demand: Demand, workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The prefill worker with the fewest uncomputed tokens that has room, or None.

    Room is blocks for the prompt, and a backlog that stays within PREFILL_BACKLOG_TOKENS; a
    worker without backlog takes a prompt of any length. Workers in `demand.avoid` come last; ties
    go to the one with most free blocks, then by id.
    """
    fitting = (
        worker
        for worker in workers
        if worker.can_hold_now(demand.prefill_tokens)
        and (
            worker.backlog_tokens == 0
            or worker.backlog_tokens + demand.prefill_tokens <= PREFILL_BACKLOG_TOKENS
        )
    )
    return min(
        fitting,
        key=lambda w: (w.worker_id in demand.avoid, w.backlog_tokens, -w.free_blocks, w.worker_id),
        default=None,
    )


def pick_decode(demand: Demand, workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The decode worker with the largest free share of its KV blocks that has room, or None.

    The KV blocks limit a decode batch, so their use is the load. Workers in `demand.avoid` come
    last; ties go by id.
    """
    fitting = (worker for worker in workers if worker.can_hold_now(demand.decode_tokens))
    return min(
        fitting,
        key=lambda w: (w.worker_id in demand.avoid, -w.free_blocks / w.total_blocks, w.worker_id),
        default=None,
    )


def pick_to_drain(num_tokens: int, workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The worker to keep free for a request that was passed over too long, or None.

    Of those large enough: the least backlog, then the most free blocks: it is ready soonest.
    """
    able = (worker for worker in workers if worker.can_ever_hold(num_tokens))
    return min(able, key=lambda w: (w.backlog_tokens, -w.free_blocks, w.worker_id), default=None)


def may_pass(blocked: Demand, candidate: Demand) -> bool:
    """Whether `candidate` may start although the earlier `blocked` cannot yet.

    Only where it asks for less on one pool and for no more on the other. Once `blocked` is
    overdue it blocks nobody by this rule; a worker is kept free for it instead (`pick_to_drain`),
    so that it starts as soon as that worker's present work is done.
    """
    needs = (
        (candidate.prefill_tokens, blocked.prefill_tokens),
        (candidate.decode_tokens, blocked.decode_tokens),
    )
    return all(own <= other for own, other in needs) and any(own < other for own, other in needs)


def queue_rank(*, batch: bool, waited_s: float, arrival: int) -> tuple[int, int]:
    """The order of the queue: interactive before batch, first come first served within each.

    A batch request that has waited BATCH_AGEING_S counts as interactive.
    """
    behind = batch and waited_s < BATCH_AGEING_S
    return (int(behind), arrival)
