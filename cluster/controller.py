"""Controller: keeps what runs equal to what is wanted. Plain Python: no Ray, no clock, no socket.

Whoever drives it hands in the time with every call, reports what happened to workers, and calls
`step` after each event and a few times a second.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from legato.cluster.adoption import ControllerMemory, WorkerMemory, plan_adoption
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.pool import (
    ControllerOptions,
    Drain,
    Kill,
    Pool,
    Start,
    WorkerRecord,
    WorkerState,
    decide,
    describe,
)
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from legato.cluster.adoption import FoundWorker
    from legato.cluster.control_plane import Role

log = logging.getLogger(__name__)
ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_POOL_SIZE = 1024

WIRE_ROLE: dict[Role, common_pb2.WorkerRole.ValueType] = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}
_WIRE_PHASE = {
    WorkerState.STARTING: common_pb2.WORKER_PHASE_STARTING,
    WorkerState.READY: common_pb2.WORKER_PHASE_READY,
    WorkerState.DRAINING: common_pb2.WORKER_PHASE_DRAINING,
    WorkerState.DEAD: common_pb2.WORKER_PHASE_DEAD,
}


@dataclass(frozen=True)
class StartedWorker:
    """What a worker says of itself once it serves."""

    worker_id: str
    address: str
    pid: int
    host: str


class Launcher(Protocol):
    """Begins what is asked and returns at once; outcomes come back as the controller's events."""

    def start(self, name: str, role: Role) -> None:
        """Leads to `on_ready` or `on_dead`, and to `on_dead` whenever the process ends."""
        ...

    def adopt(self, name: str, role: Role) -> None:
        """A worker that an earlier controller started: leads to what `start` leads to."""
        ...

    def drain(self, name: str, timeout_s: float) -> None:
        """No new work; running work has `timeout_s`. Leads to `on_drained`."""
        ...

    def kill(self, name: str) -> None:
        """Ends the process, whatever it does."""
        ...

    def waiting_for(self, name: str) -> str:
        """What the start of this worker waits for, such as a GPU or its weights, or nothing."""
        ...


class Controller:
    """Both pools. Publishes the full list of workers to the router on every change."""

    def __init__(
        self,
        launcher: Launcher,
        publish: Callable[[tuple[WorkerEndpoint, ...]], None],
        targets: Mapping[Role, int],
        options: ControllerOptions | None = None,
        remember: Callable[[ControllerMemory], None] = lambda _: None,
    ) -> None:
        """`remember` gets what a next controller must know, before the launcher is told of it."""
        self._launcher = launcher
        self._publish = publish
        self._remember = remember
        self._options = options or ControllerOptions()
        self._pools = {role: Pool(role, _checked_size(role, targets[role])) for role in ROLES}
        self._published: tuple[WorkerEndpoint, ...] = ()
        self._closed = False
        self._held = ""  # why nothing can be started
        self._num_started = dict.fromkeys(ROLES, 0)
        self._remembered: ControllerMemory | None = None

    def adopt(self, memory: ControllerMemory, found: Iterable[FoundWorker], now_s: float) -> None:
        """Takes over from a controller whose process ended; before the first `step`.

        Publishes once, when all of it is known: a part of the list would have routers drop workers
        that serve.
        """
        self._num_started.update(memory.num_started)
        self._closed = self._closed or memory.closed
        for role, target in memory.targets.items():
            self._pools[role].target = target
        adoption = plan_adoption(memory, found, now_s, self._options)
        for record in adoption.records:
            self._pools[record.role].workers[record.name] = record
            log.info("worker %s (%s) is taken over", record.name, record.state.value)
        self._publish_changes()
        for record in adoption.records:
            self._launcher.adopt(record.name, record.role)
            if record.state is WorkerState.DRAINING:
                self._launcher.drain(record.name, self._options.drain_timeout_s)
        for name, reason in adoption.ended.items():
            log.warning("worker %s is ended: %s", name, reason)
            self._launcher.kill(name)

    def hold(self, reason: str) -> None:
        """Nothing can be started for now; "" lets it again. All else goes on."""
        self._held = reason

    def step(self, now_s: float) -> None:
        """Takes the actions that `decide` names, and publishes if the workers changed."""
        if self._closed:
            return
        self._remember_changes()
        for pool in self._pools.values():
            pool.forgive(now_s, self._options)
            for action in decide(pool, now_s, self._options):
                match action:
                    case Start() if not self._held:
                        self._start(pool, now_s)
                    case Drain(name):
                        pool.workers[name].move(WorkerState.DRAINING, now_s)
                        # The router first: it must send nothing new to a worker that refuses it.
                        self._publish_changes()
                        self._launcher.drain(name, self._options.drain_timeout_s)
                    case Kill(name, reason, failed):
                        waiting = self._launcher.waiting_for(name)
                        reason = f"{reason}: {waiting}" if waiting else reason
                        self._end(pool, pool.workers[name], reason, now_s, failed=failed)
        self._publish_changes()

    def set_targets(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        """Sets those named; returns both.

        Raises:
            ValueError: an unknown pool or a size out of range; then nothing is changed.
        """
        sizes = {role: _checked_size(role, size) for role, size in targets.items()}
        for role, size in sizes.items():
            pool = self._pools[role]
            if size != pool.target:
                pool.target = size
                pool.note_success()  # the operator asks anew: try at once
        self.step(now_s)
        return {role: pool.target for role, pool in self._pools.items()}

    def close(self) -> None:
        """The service ends: from now on nothing is started or scaled."""
        self._closed = True
        self._remember_changes()

    # Events. One about a worker that is no longer known is old news: the kill that was asked for
    # and the death that follows it cross on the way.

    def on_ready(self, name: str, started: StartedWorker, now_s: float) -> None:
        """The worker serves."""
        pool, worker = self._find(name)
        if pool is None or worker is None or worker.state is not WorkerState.STARTING:
            return
        worker.move(WorkerState.READY, now_s)
        worker.endpoint = WorkerEndpoint(started.worker_id, worker.role, started.address)
        worker.pid, worker.host = started.pid, started.host
        log.info("worker %s (%s) is ready", worker.name, _known_id(worker))
        self.step(now_s)

    def on_dead(self, name: str, reason: str, now_s: float, *, permanent: bool = False) -> None:
        """The worker's process ended, or its start failed; `permanent`: it always will."""
        pool, worker = self._find(name)
        if pool is None or worker is None:
            return
        failed = worker.state is WorkerState.STARTING or (
            worker.state is WorkerState.READY
            and now_s - worker.since_s < self._options.early_life_s
        )
        self._end(pool, worker, reason, now_s, failed=failed, permanent=permanent)
        self.step(now_s)

    def on_drained(self, name: str, now_s: float) -> None:
        """The worker has nothing left to do."""
        pool, worker = self._find(name)
        if pool is None or worker is None:
            return
        self._end(pool, worker, "drained", now_s, failed=False)
        self.step(now_s)

    def report_lost(self, worker_id: str, reason: str, now_s: float) -> None:
        """The router saw this worker hang or die: end it, and let `step` replace it."""
        for pool in self._pools.values():
            for worker in pool.workers.values():
                if worker.endpoint is not None and worker.endpoint.worker_id == worker_id:
                    self.on_dead(worker.name, reason, now_s)
                    return

    # What others may know.

    def endpoints(self) -> tuple[WorkerEndpoint, ...]:
        """Every worker that serves, those that drain included."""
        return tuple(
            dataclasses.replace(worker.endpoint, draining=worker.state is WorkerState.DRAINING)
            for pool in self._pools.values()
            for worker in pool.in_state(WorkerState.READY, WorkerState.DRAINING)
            if worker.endpoint is not None
        )

    def pools(self, now_s: float) -> list[cluster_pb2.PoolStatus]:
        """Targets and workers; the loads are the router's to add."""
        return [self._pool_status(pool, now_s) for pool in self._pools.values()]

    def worker_names(self) -> list[str]:
        """Of every live worker."""
        return [name for pool in self._pools.values() for name in pool.workers]

    def hopeless(self) -> str:
        """Why a pool cannot reach its target by itself any more; empty while it may."""
        for pool in self._pools.values():
            ready = len(pool.in_state(WorkerState.READY))
            if ready < pool.target and pool.gives_up(self._options):
                return pool.last_failure
        return ""

    def _pool_status(self, pool: Pool, now_s: float) -> cluster_pb2.PoolStatus:
        waiting = [
            text
            for worker in pool.in_state(WorkerState.STARTING)
            if (text := self._launcher.waiting_for(worker.name))
        ]
        message = describe(pool, now_s, self._options, waiting)
        return cluster_pb2.PoolStatus(
            role=WIRE_ROLE[pool.role],
            target=pool.target,
            ready=len(pool.in_state(WorkerState.READY)),
            workers=[_worker_status(worker) for worker in pool.workers.values()],
            message="; ".join(text for text in (message, self._held) if text),
        )

    def _start(self, pool: Pool, now_s: float) -> None:
        self._num_started[pool.role] += 1
        name = f"{pool.role}-{self._num_started[pool.role]}"
        pool.workers[name] = WorkerRecord(name, pool.role, WorkerState.STARTING, now_s)
        log.info("worker %s starts", name)
        self._remember_changes()
        self._launcher.start(name, pool.role)

    def _end(
        self,
        pool: Pool,
        worker: WorkerRecord,
        reason: str,
        now_s: float,
        *,
        failed: bool,
        permanent: bool = False,
    ) -> None:
        if failed:
            pool.note_failed_start(
                f"{worker.name}: {reason}", now_s, self._options, permanent=permanent
            )
        elif worker.state is WorkerState.READY:
            pool.note_success()  # it lived long: the replacement starts at once
        level = logging.INFO if worker.state is WorkerState.DRAINING else logging.WARNING
        log.log(level, "worker %s (%s) ended: %s", worker.name, _known_id(worker), reason)
        worker.move(WorkerState.DEAD, now_s)
        del pool.workers[worker.name]
        self._publish_changes()  # before the kill: nothing new may go there
        self._launcher.kill(worker.name)

    def _find(self, name: str) -> tuple[Pool | None, WorkerRecord | None]:
        for pool in self._pools.values():
            if name in pool.workers:
                return pool, pool.workers[name]
        return None, None

    def _remember_changes(self) -> None:
        memory = ControllerMemory(
            targets={role: pool.target for role, pool in self._pools.items()},
            num_started=dict(self._num_started),
            workers={
                worker.name: WorkerMemory(worker.role, worker.state)
                for pool in self._pools.values()
                for worker in pool.workers.values()
            },
            closed=self._closed,
        )
        if memory != self._remembered:
            self._remembered = memory
            self._remember(memory)

    def _publish_changes(self) -> None:
        self._remember_changes()
        endpoints = self.endpoints()
        if endpoints != self._published:
            self._published = endpoints
            self._publish(endpoints)


def _checked_size(role: str, size: int) -> int:
    if role not in ROLES:
        raise ValueError(f"pool must be prefill or decode, got {role!r}")
    if not 0 <= size <= MAX_POOL_SIZE:
        raise ValueError(f"{role} must be in [0, {MAX_POOL_SIZE}], got {size}")
    return size


def _known_id(worker: WorkerRecord) -> str:
    """As others know it, once it serves."""
    return worker.endpoint.worker_id if worker.endpoint else worker.name


def _worker_status(worker: WorkerRecord) -> cluster_pb2.WorkerStatus:
    endpoint = worker.endpoint
    return cluster_pb2.WorkerStatus(
        worker_id=_known_id(worker),
        role=WIRE_ROLE[worker.role],
        phase=_WIRE_PHASE[worker.state],
        address=endpoint.address if endpoint else "",
        pid=worker.pid,
        host=worker.host,
    )
