"""Colocated or apart: where a request goes that either could serve. Pure rules over snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legato.cluster.policies import ASSUMED_LOCAL_FACTOR, PREFILL_BACKLOG_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.policies import Demand, PrefillCosts, WorkerSnapshot

    # A prefill worker, and the decode worker where one is needed.
    Apart = tuple[WorkerSnapshot | None, WorkerSnapshot | None] | None


def one_answer(demand: Demand) -> Demand:
    """What the first of several answers asks of a colocated worker.

    There each has an attempt of its own, and the others begin when the first has its first token:
    by then they find the prompt's full blocks, on that worker at least.
    """
    return replace(demand, num_answers=1)


def pick_colocated(demand: Demand, workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The colocated worker with the fewest uncomputed tokens that has room for the prompt, or None.

    As on a prefill worker, a backlog stays within PREFILL_BACKLOG_TOKENS, but a worker without one
    takes a prompt of any length. Workers in `demand.avoid` come last; ties go to the one with the
    largest free share of its KV blocks, then by id.
    """
    fitting = (
        worker
        for worker in workers
        if worker.can_hold_now(demand)
        and (
            worker.backlog_tokens == 0
            or worker.backlog_tokens + demand.prefill_tokens <= PREFILL_BACKLOG_TOKENS
        )
    )
    return min(
        fitting,
        key=lambda w: (
            w.worker_id in demand.avoid,
            w.backlog_tokens,
            -w.free_blocks / w.total_blocks,
            w.worker_id,
        ),
        default=None,
    )


def prefers_colocated(
    demand: Demand,
    colocated: WorkerSnapshot,
    pair: Apart,
    costs: PrefillCosts,
) -> bool:
    """Whether a request goes to the colocated worker that has room rather than to a pair that has.

    `pair`: a prefill worker, and the decode worker where the request needs one; None: no pair has
    room. Then it goes. Else where its first step costs less there: the tokens that wait and its
    own, at what one costs on that worker between its decode steps, against the same on the prefill
    worker and the hand-off. `costs.local_token_s` is the colocated worker's. What was not measured
    of late goes to the pair, and so does a request that failed on the colocated worker before.
    """
    prefill, decode = pair or (None, None)
    if prefill is None:
        return True
    failed_apart = any(w is not None and w.worker_id in demand.avoid for w in (prefill, decode))
    if (colocated.worker_id in demand.avoid) != failed_apart:
        return failed_apart
    if costs.remote_token_s is None or (decode is not None and costs.remote_overhead_s is None):
        return False
    local_token_s = costs.local_token_s
    if local_token_s is None:
        local_token_s = ASSUMED_LOCAL_FACTOR * costs.remote_token_s
    num_tokens = demand.prefill_tokens
    local_s = (colocated.backlog_tokens + num_tokens) * local_token_s
    apart_s = (prefill.backlog_tokens + num_tokens) * costs.remote_token_s
    if decode is not None and costs.remote_overhead_s is not None:
        apart_s += costs.remote_overhead_s
    return local_s < apart_s
