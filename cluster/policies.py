"""Placement policies: pure rules over frozen snapshots; no clock, no socket, no state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from legato.cluster.control_plane import Role

# Prompt tokens that may lie uncomputed at one prefill worker: two chunks of the default size keep
# it busy, and what waits longer waits in the router's queue, where it can still be dropped,
# reordered or sent elsewhere.
PREFILL_BACKLOG_TOKENS = 4096
# A batch request that has waited this long counts as interactive from then on, here and on the
# workers, so that a steady stream of those cannot keep it out for ever.
BATCH_AGEING_S = 10.0
# A decode worker that has not measured yet what computing a prompt's token costs it: its steps are
# short and batches of one prompt, so each weighs more than on a prefill worker.
ASSUMED_LOCAL_FACTOR = 4.0


@dataclass(frozen=True)
class Demand:
    """What one attempt needs: at one answer, or at all answers to a prompt together."""

    prefill_tokens: int  # prompt, and what was emitted so far where an answer goes on elsewhere
    decode_tokens: int  # rows of KV of each answer at its end; 0 where they end in prefill
    num_answers: int = 1  # they share the full blocks of the prompt
    batch: bool = False
    avoid: frozenset[str] = frozenset()  # ids of workers that failed it: chosen only without others

    @property
    def all_decode_tokens(self) -> int:
        """Of all answers, as if they shared nothing."""
        return self.decode_tokens * self.num_answers


@dataclass(frozen=True)
class WorkerSnapshot:
    """One placeable worker: its capacity, and what is left of it as far as the router knows."""

    worker_id: str
    role: Role
    block_size: int
    total_blocks: int
    free_blocks: int
    backlog_tokens: int = 0  # prompt tokens sent and not yet computed (prefill, colocated)
    local_token_s: float = 0.0  # what one of a prompt costs there (not in prefill); 0: not measured
    full: bool = False  # it failed or refused a request for good, and has not reported since
    refused: tuple[Demand, ...] = ()  # for want of room, since it last reported
    doubtful: tuple[Demand, ...] = ()  # the same, of late: one by one they may ask again
    asking: tuple[Demand, ...] = ()  # has yet to answer these

    def blocks_now(self, demand: Demand) -> int:
        """Blocks that must be free for the attempt to begin.

        Decode needs the rows of the hand-off and one more, the first step's; whether there is room
        for what the answers will grow to, the worker itself judges when it is asked for a ticket.
        """
        if self.role == "prefill" or demand.decode_tokens == 0:
            return self._blocks_for(demand.prefill_tokens)
        return self._decode_blocks(demand, demand.prefill_tokens + 1)

    def blocks_at_end(self, demand: Demand) -> int:
        """Blocks of an attempt whose answers get as long as they may."""
        if self.role == "prefill" or demand.decode_tokens == 0:
            return self._blocks_for(demand.prefill_tokens)
        return self._decode_blocks(demand, demand.decode_tokens)

    def blocks_grown(self, demand: Demand, output_tokens: int) -> int:
        """Blocks of an attempt whose answers get so long, or as long as they may."""
        rows = min(demand.decode_tokens, demand.prefill_tokens + output_tokens)
        return self._decode_blocks(demand, max(demand.prefill_tokens + 1, rows))

    def can_ever_hold(self, demand: Demand) -> bool:
        """True where the whole worker is large enough."""
        return self.blocks_at_end(demand) <= self.total_blocks

    def can_hold_now(self, demand: Demand) -> bool:
        """True where the worker is worth asking."""
        return (
            not self.full
            and self.can_ever_hold(demand)
            and self.blocks_now(demand) <= self.free_blocks
            and not (self.refused and self._asks_no_less(demand, self.refused))
            and not (
                self.doubtful
                and self._asks_no_less(demand, self.doubtful)
                and self._asks_no_less(demand, self.asking)
            )
        )

    def least_of(self, demands: Iterable[Demand]) -> list[Demand]:
        """Those whose refusal is not implied by another's."""
        least: list[Demand] = []
        for demand in demands:
            if not self._asks_no_less(demand, least):
                least = [d for d in least if not self._asks_no_less(d, (demand,))] + [demand]
        return least

    def _asks_no_less(self, demand: Demand, others: Iterable[Demand]) -> bool:
        """Whether a refusal of one of the others is one of this demand too."""
        return any(
            self.blocks_now(demand) >= self.blocks_now(other)
            and self.blocks_at_end(demand) >= self.blocks_at_end(other)
            and demand.batch >= other.batch
            for other in others
        )

    def _decode_blocks(self, demand: Demand, num_rows: int) -> int:
        """With `num_rows` rows an answer. As `CapacityLedger` on the worker counts."""
        if demand.num_answers == 1:
            return -(-num_rows // self.block_size)
        shared = demand.prefill_tokens // self.block_size
        return shared + demand.num_answers * (self._blocks_for(num_rows) - shared)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class Knowledge:
    """What was learnt of the workers, for one request; empty: nothing, and load alone decides."""

    held: Mapping[str, int] = field(default_factory=dict)  # first tokens whose KV is there
    prefill_tokens_s: Mapping[str, float] = field(default_factory=dict)
    path_rows_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    expected_output: int = 0  # tokens of each answer

    def uncached(self, demand: Demand, worker_id: str) -> int:
        """Tokens of KV that the worker lacks; of a prompt the last is computed in any case."""
        return max(1, demand.prefill_tokens - self.held.get(worker_id, 0))


NOTHING_KNOWN = Knowledge()


def takes_prompt(demand: Demand, worker: WorkerSnapshot, known: Knowledge = NOTHING_KNOWN) -> bool:
    """Whether a prefill worker has room, as `pick_prefill` has it."""
    return worker.can_hold_now(demand) and (
        worker.backlog_tokens == 0
        or worker.backlog_tokens + known.uncached(demand, worker.worker_id)
        <= PREFILL_BACKLOG_TOKENS
    )


def pick_prefill(
    demand: Demand,
    workers: Iterable[WorkerSnapshot],
    known: Knowledge = NOTHING_KNOWN,
    decode: str | None = None,
) -> WorkerSnapshot | None:
    """The prefill worker from which the first token is expected soonest and that has room, or None.

    Room is blocks for the prompt, and a backlog that stays within PREFILL_BACKLOG_TOKENS with what
    the worker would have to compute; one without backlog takes a prompt of any length. The time is
    that of the backlog and of the part of the prompt whose KV the worker does not hold, at its
    measured speed; and, where `decode` is given, that of the rows which it lacks, over the path's
    measured speed. What was not measured counts as the mean of what was; where no prefill speed is
    known, tokens alone are compared. So a worker that holds the prompt's beginning is preferred up
    to the backlog which computing that part would be, and no further: load has the last word, and
    a common prefix spreads. Workers in `demand.avoid` come last; ties go to the one with most free
    blocks, then by id.
    """
    fitting = [worker for worker in workers if takes_prompt(demand, worker, known)]
    speeds, paths = known.prefill_tokens_s, known.path_rows_s
    usual_speed = _mean(speeds.values())
    usual_path = _mean(speed for (_, to), speed in paths.items() if to == decode)
    num_rows = 0 if decode is None else demand.prefill_tokens - known.held.get(decode, 0)

    def first_token_s(worker_id: str, backlog_tokens: int) -> float:
        tokens = backlog_tokens + known.uncached(demand, worker_id)
        if usual_speed is None:
            return tokens
        seconds = tokens / speeds.get(worker_id, usual_speed)
        if decode is not None and usual_path is not None:
            seconds += max(0, num_rows) / paths.get((worker_id, decode), usual_path)
        return seconds

    return min(
        fitting,
        key=lambda w: (
            w.worker_id in demand.avoid,
            first_token_s(w.worker_id, w.backlog_tokens),
            -w.free_blocks,
            w.worker_id,
        ),
        default=None,
    )


def pick_decode(
    demand: Demand, workers: Iterable[WorkerSnapshot], known: Knowledge = NOTHING_KNOWN
) -> WorkerSnapshot | None:
    """The decode worker with the largest share of its KV blocks free once the request has grown to
    what is expected of it, or None where none has room.

    The KV blocks limit a decode batch, so their use is the load. Rows of the prompt that a worker
    holds are not sent to it, and need no block that is not in use already: it counts as having as
    many more blocks, so that it is preferred up to that difference in load and no further. Workers
    in `demand.avoid` come last; ties go by id.
    """

    def free_share(worker: WorkerSnapshot) -> float:
        held = min(known.held.get(worker.worker_id, 0), demand.prefill_tokens)
        grown = worker.blocks_grown(demand, known.expected_output)
        return (worker.free_blocks - grown + held // worker.block_size) / worker.total_blocks

    fitting = (worker for worker in workers if worker.can_hold_now(demand))
    return min(
        fitting,
        key=lambda w: (w.worker_id in demand.avoid, -free_share(w), w.worker_id),
        default=None,
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def pick_to_drain(demand: Demand, workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The worker to keep free for a request that was passed over too long, or None.

    Of those large enough: the least backlog, then the most free blocks: it is ready soonest.
    """
    able = (worker for worker in workers if worker.can_ever_hold(demand))
    return min(able, key=lambda w: (w.backlog_tokens, -w.free_blocks, w.worker_id), default=None)


def may_pass(blocked: Demand, candidate: Demand) -> bool:
    """Whether `candidate` may start although the earlier `blocked` cannot yet.

    Only where it asks for less on one pool and for no more on the other. Once `blocked` is
    overdue it blocks nobody by this rule; a worker is kept free for it instead (`pick_to_drain`),
    so that it starts as soon as that worker's present work is done.
    """
    needs = (
        (candidate.prefill_tokens, blocked.prefill_tokens),
        (candidate.all_decode_tokens, blocked.all_decode_tokens),
    )
    return all(own <= other for own, other in needs) and any(own < other for own, other in needs)


def counts_as_batch(*, batch: bool, waited_s: float) -> bool:
    """Whether it still stands behind the interactive ones."""
    return batch and waited_s < BATCH_AGEING_S


def queue_rank(*, batch: bool, waited_s: float, arrival: int) -> tuple[int, int]:
    """The order of the queue: interactive before batch, first come first served within each."""
    return (int(counts_as_batch(batch=batch, waited_s=waited_s)), arrival)


@dataclass(frozen=True)
class PrefillCosts:
    """What the ways to an answer's first step cost, as measured; None: not measured of late."""

    remote_overhead_s: float | None  # from the ticket to the batch, without queue and model
    remote_token_s: float | None  # of a prefill worker's model, for each token that it computes
    local_token_s: float | None  # of the decode worker that granted the ticket


def prefills_locally(
    num_uncached: int, backlog_tokens: int, costs: PrefillCosts, max_tokens: int
) -> bool:
    """Whether the decode worker computes the rest of a prompt itself, between its decode steps.

    Where it costs no more than the remote way: the tokens that wait at the prefill worker, these
    ones, and the hand-off. `num_uncached`: tokens whose KV the decode worker lacks; all but the
    last may be there, and that one is computed in any case. `max_tokens` bounds what the streams
    that run there are made to wait; 0 is off. What was not measured goes the remote way.
    """
    num_computed = max(1, num_uncached)
    if num_computed > max_tokens or costs.remote_overhead_s is None or costs.remote_token_s is None:
        return False
    local_token_s = costs.local_token_s
    if local_token_s is None:
        local_token_s = ASSUMED_LOCAL_FACTOR * costs.remote_token_s
    remote_s = (backlog_tokens + num_computed) * costs.remote_token_s + costs.remote_overhead_s
    return num_computed * local_token_s <= remote_s
