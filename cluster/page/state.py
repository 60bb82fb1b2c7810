"""page_state: what the live page shows of a router, as JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from legato.cluster.metrics.state import state_of
from legato.cluster.roles import WIRE_ROLES
from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.cluster.router import Router
    from legato.protos import cluster_pb2

_ROLES = {number: role for role, number in WIRE_ROLES.items()}
_BLOCKS = ("total", "free", "reserved", "held", "cached")
_GAUGES = ("running", "waiting", "waiting_tokens", "transferring", "swapped")
_COUNTERS = ("prefix_blocks_asked", "prefix_blocks_hit", "preemptions", "kv_transfers_completed")


def page_state(router: Router) -> dict[str, Any]:
    """As of now; the controller's word is up to two seconds old. It waits for nothing."""
    poll, counters = router.pool_poll, router.counters
    return {
        "model": router.model_name,
        "version": router.version,
        "uptime_s": time.monotonic() - router.started_at,
        "ready": router.ready,
        "missing": "" if router.ready else router.missing(),
        "controller_answers": poll.pools is not None,
        "has_chat_template": router.text.has_chat_template,
        "queued": router.admission.num_queued,
        "in_flight": router.num_in_flight,
        "ended": {
            name: getattr(counters, name)
            for name in ("completed", "failed", "cancelled", "refused", "moved", "moved_with_kv")
        },
        "pools": [_pool(router, role) for role in WIRE_ROLES if _is_shown(router, role)],
        "autoscaler": None if poll.autoscaler is None else _autoscaler(poll.autoscaler),
    }


def _is_shown(router: Router, role: str) -> bool:
    return role != "colocated" or role in router.pool.seen_roles


def _pool(router: Router, role: str) -> dict[str, Any]:
    told = next((p for p in router.pool_poll.pools or () if _ROLES.get(p.role) == role), None)
    workers = {
        view.worker_id: {
            "id": view.worker_id,
            "state": state_of(view),
            "host": view.identity.host if view.identity is not None else "",
            "address": view.endpoint.address,
            "reason": view.lost_reason,
            "load": None if view.load is None else _load(view.load),
        }
        for view in router.pool.views()
        if view.endpoint.role == role
    }
    for worker in () if told is None else told.workers:  # those that start are the controller's
        if worker.worker_id not in workers:
            state = common_pb2.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_").lower()
            workers[worker.worker_id] = {
                "id": worker.worker_id,
                "state": state,
                "host": worker.host,
                "address": worker.address,
                "reason": "",
                "load": None,
            }
    return {
        "role": role,
        "target": None if told is None else told.target,
        "message": "" if told is None else told.message,
        "workers": [workers[worker_id] for worker_id in sorted(workers)],
    }


def _load(load: common_pb2.WorkerLoad) -> dict[str, Any]:
    return {
        "blocks": {name: getattr(load, f"{name}_blocks") for name in _BLOCKS},
        **{name: getattr(load, name) for name in (*_GAUGES, *_COUNTERS)},
    }


def _autoscaler(told: cluster_pb2.AutoscalerStatus) -> dict[str, Any]:
    return {
        "dry_run": told.dry_run,
        "ttft_slo_s": told.ttft_slo_s,
        "itl_slo_s": told.itl_slo_s,
        "pools": [
            {
                "role": _ROLES.get(pool.role, ""),
                "min": pool.min_workers,
                "max": pool.max_workers,
                "needed": pool.needed,
                "reason": pool.reason,
            }
            for pool in told.pools
        ],
        "decisions": [{"age_s": d.age_s, "text": d.text} for d in reversed(told.decisions)],
    }
