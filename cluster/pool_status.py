"""pool_status: a pool as the controller tells of it, on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.pool import WorkerState
from legato.cluster.roles import WIRE_ROLES
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from legato.cluster.pool import Pool, WorkerRecord

_WIRE_PHASE = {
    WorkerState.STARTING: common_pb2.WORKER_PHASE_STARTING,
    WorkerState.READY: common_pb2.WORKER_PHASE_READY,
    WorkerState.DRAINING: common_pb2.WORKER_PHASE_DRAINING,
    WorkerState.DEAD: common_pb2.WORKER_PHASE_DEAD,
}


def pool_status(pool: Pool, message: str) -> cluster_pb2.PoolStatus:
    """Target and workers; `message` is why it is not as it should be. Loads are not in it."""
    return cluster_pb2.PoolStatus(
        role=WIRE_ROLES[pool.role],
        target=pool.target,
        ready=len(pool.in_state(WorkerState.READY)),
        workers=[_worker_status(worker) for worker in pool.workers.values()],
        message=message,
    )


def _worker_status(worker: WorkerRecord) -> cluster_pb2.WorkerStatus:
    endpoint = worker.endpoint
    return cluster_pb2.WorkerStatus(
        worker_id=worker.known_id,
        role=WIRE_ROLES[worker.role],
        phase=_WIRE_PHASE[worker.state],
        address=endpoint.address if endpoint else "",
        pid=worker.pid,
        host=worker.host,
        becomes=common_pb2.WORKER_ROLE_UNSPECIFIED
        if worker.becomes is None
        else WIRE_ROLES[worker.becomes],
        predecessor=worker.predecessor,
    )
