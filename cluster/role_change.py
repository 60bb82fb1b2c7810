"""Role change: which worker may go from its pool into another, and why one may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.errors import shown
from legato.cluster.pool import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.pool import Pool, WorkerRecord


class UnknownWorkerError(ValueError):
    """There is no such worker, or node."""


class RoleChangeRefusedError(ValueError):
    """Not this worker, or not now; nothing was changed."""


@dataclass(frozen=True)
class RoleChange:
    """One that has begun: whose, and the targets from now on."""

    worker_id: str  # the old one
    targets: Mapping[Role, int]


def find_worker(pools: Iterable[Pool], worker_id: str) -> tuple[Pool, WorkerRecord]:
    """The worker with that id, or the only one whose id begins so.

    Raises:
        ValueError: the id is empty, or begins several.
        UnknownWorkerError: it begins none.
    """
    if not worker_id:
        raise ValueError(
            "worker_id is empty, limit at least 1 character: a worker's id, or its beginning"
        )
    found = {
        worker.known_id: (pool, worker)
        for pool in pools
        for worker in pool.workers.values()
        if worker.known_id.startswith(worker_id)
    }
    if worker_id in found:
        return found[worker_id]
    if not found:
        raise UnknownWorkerError(f"no worker has an id that begins with {shown(worker_id)}")
    if len(found) > 1:
        raise ValueError(
            f"worker_id is {shown(worker_id)}, limit what begins 1 id: it begins {len(found)} ids: "
            f"{', '.join(sorted(found))}"
        )
    return next(iter(found.values()))


def check_ready(worker: WorkerRecord, what: str) -> None:
    """Raises RoleChangeRefusedError where it is not: only a ready worker `what`."""
    if worker.state is not WorkerState.READY:
        raise RoleChangeRefusedError(
            f"worker {worker.known_id} is {worker.state.value}: only a ready worker {what}"
        )


def check_role_change(
    pool: Pool, worker: WorkerRecord, target: Pool, max_size: int, obstacle: str
) -> None:
    """`obstacle`: why no worker of the one role can have the other, or nothing.

    Raises:
        RoleChangeRefusedError: saying why.
    """
    name = f"worker {worker.known_id}"
    if worker.becomes is not None:
        raise RoleChangeRefusedError(f"{name} is on its way to the {worker.becomes} pool already")
    if target is pool:
        raise RoleChangeRefusedError(f"{name} is a {pool.role} worker already")
    check_ready(worker, "can change its role")
    if len(pool.in_state(WorkerState.READY)) == 1:
        raise RoleChangeRefusedError(
            f"{name} is the last ready worker of the {pool.role} pool, which would be empty; first "
            f"let the pool have another: legato scale {pool.role}={max(pool.target, 1) + 1}"
        )
    if target.target >= max_size:
        raise RoleChangeRefusedError(f"{target.role} has {target.target} workers, limit {max_size}")
    if obstacle:
        raise RoleChangeRefusedError(f"{name} cannot become a {target.role} worker: {obstacle}")
