"""state_families: the gauges, and the workers' own counters, as they are at this moment."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from legato.cluster.metrics import catalogue as names
from legato.cluster.metrics.tallies import counter, gauge
from legato.cluster.roles import ROLES, WIRE_ROLES
from legato.cluster.worker_view import ViewState
from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric as Family

    from legato.cluster.metrics.catalogue import Metric
    from legato.cluster.router import Router
    from legato.cluster.worker_view import WorkerView

    Rows = list[tuple[tuple[str, ...], float]]

_ROLE_NAMES = {number: role for role, number in WIRE_ROLES.items()}
STATES = ("connecting", "starting", "ready", "draining", "lost", "dead")
# A worker's report in the families that tell it: labels behind worker and role, and the field.
_GAUGES: tuple[tuple[Metric, tuple[tuple[tuple[str, ...], str], ...]], ...] = (
    (names.KV_CAPACITY, (((), "total_blocks"),)),
    (
        names.KV_BLOCKS,
        tuple(((state,), f"{state}_blocks") for state in ("free", "reserved", "held")),
    ),
    (names.KV_CACHED, (((), "cached_blocks"),)),
    (names.RUNNING, (((), "running"),)),
    (names.WAITING, (((), "waiting"),)),
    (names.WAITING_TOKENS, (((), "waiting_tokens"),)),
    (names.TRANSFERRING, (((), "transferring"),)),
    (names.SWAPPED, (((), "swapped"),)),
    (
        names.SWAP_BLOCKS,
        ((("capacity",), "swap_total_blocks"), (("held",), "swap_held_blocks")),
    ),
)
_COUNTERS: tuple[tuple[Metric, tuple[tuple[tuple[str, ...], str], ...]], ...] = (
    (names.STEPS, tuple(((kind,), f"{kind}_steps") for kind in ("prefill", "decode"))),
    (names.TOKENS, tuple(((kind,), f"{kind}_tokens") for kind in ("prefill", "decode"))),
    (names.MODEL_SECONDS, (((), "model_s"),)),
    (names.SENT, (((), "kv_bytes_sent"),)),
    (names.SENT_BY_MEMORY, (((), "kv_bytes_sent_by_memory"),)),
    (names.RECEIVED, (((), "kv_bytes_received"),)),
    (
        names.TRANSFERS,
        tuple(((result,), f"kv_transfers_{result}") for result in ("completed", "failed")),
    ),
    (names.CHUNKS_REFUSED, (((), "kv_chunks_refused"),)),
    (
        names.PREFIX_BLOCKS,
        tuple(((event,), f"prefix_blocks_{event}") for event in ("asked", "hit", "evicted")),
    ),
    (
        names.WORKER_PREEMPTIONS,
        ((("all",), "preemptions"), (("returned",), "preemptions_returned")),
    ),
)


def state_of(view: WorkerView) -> str:
    """One of STATES."""
    if view.state is ViewState.CONNECTING:
        return "connecting"
    if view.state is not ViewState.READY:
        return "lost" if view.state is ViewState.LOST else "dead"
    if view.endpoint.draining:
        return "draining"
    return common_pb2.WorkerPhase.Name(view.phase).removeprefix("WORKER_PHASE_").lower()


def state_families(router: Router) -> Iterator[Family]:
    """Of the router, the pools and each worker that is there: those that have gone are not told."""
    yield from _router(router)
    yield from _pools(router)
    yield from _workers(router)
    yield from _vllm(router)


def _router(router: Router) -> Iterator[Family]:
    waiting = router.admission.entries()
    now_s = time.monotonic()
    priorities = Counter("batch" if e.demand.batch else "interactive" for e in waiting)
    queued: Rows = [((name,), priorities[name]) for name in ("interactive", "batch")]
    yield gauge(names.IN_FLIGHT, [((), router.num_in_flight)])
    yield gauge(names.QUEUED, queued)
    yield gauge(names.QUEUED_TOKENS, [((), sum(e.demand.prefill_tokens for e in waiting))])
    oldest_s = max((now_s - entry.waiting_since for entry in waiting), default=0.0)
    yield gauge(names.OLDEST, [((), oldest_s)])
    yield gauge(names.QUEUE_LIMIT, [((), router.options.max_queued_requests)])
    yield gauge(names.READY, [((), router.ready)])
    yield gauge(names.INFO, [((router.model_name, router.version), 1)])


def _pools(router: Router) -> Iterator[Family]:
    counts = Counter((view.endpoint.role, state_of(view)) for view in router.pool.views())
    roles = [role for role in ROLES if role != "colocated" or role in router.pool.seen_roles]
    yield gauge(
        names.POOL_WORKERS,
        [((role, state), counts[role, state]) for role in roles for state in STATES],
    )
    poll = router.pool_poll
    yield gauge(
        names.POOL_TARGET,
        [((_ROLE_NAMES[pool.role],), pool.target) for pool in poll.pools or ()],
    )
    yield gauge(names.CONTROLLER, [((), poll.pools is not None)])
    scaler = poll.autoscaler
    decisions: Rows = [] if scaler is None else [((), scaler.num_decisions)]
    needed: Rows = (
        []
        if scaler is None
        else [((_ROLE_NAMES[pool.role],), pool.needed) for pool in scaler.pools]
    )
    yield counter(names.DECISIONS, decisions)
    yield gauge(names.NEEDED, needed)


def _workers(router: Router) -> Iterator[Family]:
    known = [
        ((view.worker_id, view.endpoint.role), view.load, view.last_report_at)
        for view in router.pool.views()
        if view.load is not None
    ]
    now_s = time.monotonic()
    for families, make in ((_GAUGES, gauge), (_COUNTERS, counter)):
        for metric, parts in families:
            rows: Rows = [
                ((*worker, *labels), getattr(load, field))
                for worker, load, _ in known
                for labels, field in parts
            ]
            yield make(metric, rows)
    yield gauge(names.REPORT_AGE, [(worker, now_s - at_s) for worker, _, at_s in known])


def _vllm(router: Router) -> Iterator[Family]:
    model = (router.model_name,)
    views = [v for v in router.pool.views() if v.state is ViewState.READY and v.load is not None]
    loads = [view.load for view in views if view.load is not None]
    decoders = [v for v in views if v.endpoint.role != "prefill"]
    decode_loads = [view.load for view in decoders if view.load is not None]
    blocks = sum(load.total_blocks for load in decode_loads)
    used = sum(load.held_blocks + load.reserved_blocks for load in decode_loads)
    waiting = router.admission.num_queued + sum(load.waiting for load in loads)
    usage: Rows = [(model, used / blocks if blocks else 0.0)]
    yield gauge(names.VLLM_RUNNING, [(model, sum(load.running for load in loads))])
    yield gauge(names.VLLM_WAITING, [(model, waiting)])
    yield gauge(names.VLLM_KV_USAGE, usage)
    yield gauge(names.VLLM_GPU_USAGE, usage)
    sizes = {v.identity.kv_layout.block_size for v in decoders if v.identity is not None}
    info: Rows = [((*model, str(size), str(blocks)), 1) for size in sorted(sizes)[:1]]
    yield gauge(names.VLLM_CACHE_INFO, info)
