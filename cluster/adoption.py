"""Adoption: what a restarted controller takes over: what it remembers, against what it finds."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.pool import WorkerRecord, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.controller import StartedWorker
    from legato.cluster.pool import ControllerOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerMemory:
    """One live worker, as it was last known."""

    role: Role
    state: WorkerState


@dataclass(frozen=True)
class ControllerMemory:
    """What outlives a controller's process. Kept safe before anything is begun that it tells of:
    a worker that is not in it can be nobody's.
    """

    targets: Mapping[Role, int]
    num_started: Mapping[Role, int]  # names are given once: these count on
    workers: Mapping[str, WorkerMemory]  # by name, oldest first
    num_lost: Mapping[Role, int]  # workers that are not to be replaced
    closed: bool = False  # the service was ending

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes, of types that JSON has."""
        return {
            "targets": dict(self.targets),
            "num_started": dict(self.num_started),
            "workers": {
                name: [worker.role, worker.state.value] for name, worker in self.workers.items()
            },
            "num_lost": dict(self.num_lost),
            "closed": self.closed,
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> ControllerMemory:
        """The reverse of `to_json`."""
        workers = {
            name: WorkerMemory(role, WorkerState(state))
            for name, (role, state) in kept["workers"].items()
        }
        return cls(kept["targets"], kept["num_started"], workers, kept["num_lost"], kept["closed"])


@dataclass(frozen=True)
class FoundWorker:
    """A worker's actor that Ray still knows, and what it said of itself."""

    name: str
    answered: bool  # false: it waits for its place, or hangs
    role: Role | None = None  # its own word, where it has been told one
    started: StartedWorker | None = None  # once it serves
    draining: bool = False


@dataclass(frozen=True)
class Adoption:
    """What is to be done with each worker found."""

    records: tuple[WorkerRecord, ...]  # taken over, oldest first
    ended: Mapping[str, str]  # to be ended: name, reason


def plan_adoption(
    memory: ControllerMemory,
    found: Iterable[FoundWorker],
    now_s: float,
    options: ControllerOptions,
) -> Adoption:
    """Sorts the workers found. Changes nothing itself.

    One that serves goes on, as ready or draining. One that was starting goes on doing so, with the
    whole of a start's bound before it. One that had served and is mute hangs: it is ended, and so
    is one that nobody remembers, whose end was decided before. Those that are not there any more
    died meanwhile: the pool misses them, and that is all there is to do.
    """
    by_name = {worker.name: worker for worker in found}
    records: list[WorkerRecord] = []
    ended = {name: "its end was decided" for name in by_name if name not in memory.workers}
    for name, known in memory.workers.items():
        worker = by_name.get(name)
        if worker is None:
            log.warning("worker %s (%s) died meanwhile", name, known.state.value)
        elif worker.started is not None:
            records.append(_serving(worker, worker.started, known, now_s, options))
        elif known.state is WorkerState.STARTING:
            role = worker.role or known.role
            records.append(WorkerRecord(name, role, WorkerState.STARTING, now_s))
        else:
            ended[name] = "it did not answer the restarted controller"
    return Adoption(tuple(records), ended)


def _serving(
    worker: FoundWorker,
    started: StartedWorker,
    known: WorkerMemory,
    now_s: float,
    options: ControllerOptions,
) -> WorkerRecord:
    role = worker.role or known.role
    draining = worker.draining or known.state is WorkerState.DRAINING
    record = WorkerRecord(
        worker.name,
        role,
        WorkerState.READY,
        # It has lived for some time: its death would be no failed start.
        now_s - options.early_life_s,
        endpoint=WorkerEndpoint(started.worker_id, role, started.address),
        pid=started.pid,
        host=started.host,
    )
    return replace(record, state=WorkerState.DRAINING, since_s=now_s) if draining else record
