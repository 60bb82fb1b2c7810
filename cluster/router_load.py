"""RouterLoad: what one router tells the controller about every second, for the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.policies import pick_prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.control_plane import Role
    from legato.cluster.load_window import WindowFigures
    from legato.cluster.policies import Demand, WorkerSnapshot
    from legato.cluster.worker_view import WorkerView

REPORT_PERIOD_S = 1.0


@dataclass(frozen=True)
class WorkerFigures:
    """One worker that takes work, as the router sees it. All but `waiting_tokens` is the worker's
    own word, and the same from each router.
    """

    worker_id: str
    role: Role
    # Of prompts that this router has sent it and it has not begun: the one that it computes waits
    # for nobody, and would not be done sooner with more workers.
    waiting_tokens: int = 0
    total_blocks: int = 0
    used_blocks: int = 0  # of live sequences, promised ones, and those in the host's memory
    running: int = 0
    # Since it started, those of cached prefixes included: what waits is counted with them too.
    prompt_tokens: int = 0
    model_s: float = 0.0  # of its steps, since it started


@dataclass(frozen=True)
class RouterLoad:
    """Of one moment. A request that waits counts for one pool: the one that it waits for."""

    router_id: str
    window: WindowFigures
    queued_for_prefill: int = 0
    queued_prefill_tokens: int = 0
    queued_for_decode: int = 0
    queued_decode_blocks: int = 0  # to begin with; what the answers grow to is not known here
    workers: tuple[WorkerFigures, ...] = ()


def router_load(
    router_id: str,
    window: WindowFigures,
    waiting: Sequence[tuple[Demand, bool]],
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
) -> RouterLoad:
    """`waiting`: of each queued request its demand, and whether it still needs a prefill worker.

    Which pool the queue waits for shows at the smallest prompt: while a prefill worker would take
    that one at once, it is decode that has no room.
    """
    workers = tuple(_figures(view) for view in (*prefills, *decodes))
    for_prefill = [demand for demand, needs_prefill in waiting if needs_prefill]
    for_decode = [demand for demand, needs_prefill in waiting if not needs_prefill]
    snapshots = [view.snapshot() for view in prefills]
    if for_prefill and snapshots:
        smallest = min(for_prefill, key=lambda demand: demand.prefill_tokens)
        if pick_prefill(smallest, snapshots) is not None:
            for_decode += for_prefill
            for_prefill = []
    blocks = [view.snapshot() for view in decodes[:1]]
    return RouterLoad(
        router_id=router_id,
        window=window,
        queued_for_prefill=len(for_prefill),
        queued_prefill_tokens=sum(demand.prefill_tokens for demand in for_prefill),
        queued_for_decode=len(for_decode),
        queued_decode_blocks=sum(_blocks(demand, blocks) for demand in for_decode),
        workers=workers,
    )


def _blocks(demand: Demand, decodes: Sequence[WorkerSnapshot]) -> int:
    """One pool's workers are alike; without one, nothing can be said."""
    return decodes[0].blocks_now(demand) if decodes else 0


def _figures(view: WorkerView) -> WorkerFigures:
    load, identity = view.load, view.identity
    assert identity is not None, "only who has told its identity takes work"
    assert load is not None, "only who has reported takes work"
    num_prompts = load.waiting + load.running
    return WorkerFigures(
        worker_id=view.worker_id,
        role=view.endpoint.role,
        waiting_tokens=view.backlog_tokens * load.waiting // num_prompts if num_prompts else 0,
        total_blocks=load.total_blocks,
        used_blocks=load.held_blocks + load.reserved_blocks + load.swap_held_blocks,
        running=load.running,
        prompt_tokens=load.prefill_tokens + load.prefix_blocks_hit * identity.kv_layout.block_size,
        model_s=load.model_s,
    )
