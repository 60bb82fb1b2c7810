"""Controller: keeps what runs equal to what is wanted. Plain Python: no Ray, no clock, no socket.

Whoever drives it hands in the time with every call, reports what happened to workers, and calls
`step` after each event and a few times a second.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from typing import TYPE_CHECKING

from legato.cluster.adoption import ControllerMemory, plan_adoption
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.pool import (
    MAX_POOL_SIZE,
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
from legato.cluster.pool_pressure import PoolSize
from legato.cluster.pool_status import pool_status
from legato.cluster.role_change import RoleChange, check_ready, check_role_change, find_worker
from legato.cluster.roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from legato.cluster.adoption import FoundWorker
    from legato.cluster.control_plane import Role
    from legato.cluster.launcher import Launcher, StartedWorker
    from legato.protos import cluster_pb2

log = logging.getLogger(__name__)
MAX_NEWS = 16  # kept for who asks later


class Controller:
    """All pools. Publishes the full list of workers to the router on every change."""

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
        sizes = {role: _checked_size(role, targets.get(role, 0)) for role in ROLES}
        self._pools = {role: Pool(role, size) for role, size in sizes.items()}
        self._published: tuple[WorkerEndpoint, ...] = ()
        self._closed = False
        self._held = ""  # why nothing can be started
        self._num_started = dict.fromkeys(ROLES, 0)
        self._remembered: ControllerMemory | None = None
        self._num_gone = dict.fromkeys(ROLES, 0)  # lost, and no other is ready in their places
        self._news: deque[str] = deque(maxlen=MAX_NEWS)

    def take_news(self) -> list[str]:
        """Which workers that served were lost since the last call, and which are ready in their
        places, in sentences.
        """
        news = list(self._news)
        self._news.clear()
        return news

    def adopt(self, memory: ControllerMemory, found: Iterable[FoundWorker], now_s: float) -> None:
        """Takes over from a controller whose process ended; before the first `step`.

        Publishes once, when all of it is known: a part of the list would have routers drop workers
        that serve.
        """
        self._num_started.update(memory.num_started)
        self._closed = self._closed or memory.closed
        for role, target in memory.targets.items():
            self._pools[role].target = target
            self._pools[role].num_lost = memory.num_lost[role]
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
            ready = pool.in_state(WorkerState.READY)
            for worker in ready:
                if worker.leaves and (not pool.target or any(not w.leaves for w in ready)):
                    self._drain(worker, now_s)
            for worker in pool.in_state(WorkerState.STARTING):
                if self._launcher.lacks_room(worker.name):
                    worker.since_s = now_s
            for action in decide(pool, now_s, self._options, self._num_arriving(pool)):
                match action:
                    case Start() if not self._held:
                        self._start(pool, now_s)
                    case Drain(name):
                        self._drain(pool.workers[name], now_s)
                    case Kill(name, reason, failed):
                        waiting = self._launcher.waiting_for(name)
                        reason = f"{reason}: {waiting}" if waiting else reason
                        self._end(pool, pool.workers[name], reason, now_s, failed=failed)
        self._publish_changes()

    def set_targets(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        """Sets those named; returns all.

        Raises:
            ValueError: an unknown pool or a size out of range; then nothing is changed.
        """
        sizes = {role: _checked_size(role, size) for role, size in targets.items()}
        for role, size in sizes.items():
            pool = self._pools[role]
            if size != pool.target or pool.num_lost:
                pool.target, pool.num_lost, self._num_gone[role] = size, 0, 0
                pool.note_success()  # the operator asks anew: try at once
        self.step(now_s)
        return self._targets()

    def change_role(self, worker_id: str, role: Role, now_s: float) -> RoleChange:
        """The worker drains in its pool and goes on in another: the targets of both change by one.
        Where it ends meanwhile, the other pool starts a new one as for any that it lacks.

        Raises:
            UnknownWorkerError: nobody's id is, or begins with, `worker_id`.
            RoleChangeRefusedError: it may not, or not now.
            ValueError: no such pool, or the id begins several.
        """
        target = self._pools[_checked_role(role)]
        pool, worker = find_worker(self._pools.values(), worker_id)
        obstacle = self._launcher.obstacle(pool.role, role)
        check_role_change(pool, worker, target, MAX_POOL_SIZE, obstacle)
        log.info("worker %s (%s) is to become %s", worker.name, worker.known_id, role)
        pool.target = max(0, pool.target - 1)
        target.target += 1
        worker.becomes = role
        self._drain(worker, now_s)
        self.step(now_s)
        return RoleChange(worker.known_id, self._targets())

    def drain_worker(self, worker_id: str, now_s: float) -> str:
        """The worker drains and goes; another is started in its place at once. Its id in full. The
        last ready one of its pool serves until the other is ready.

        Raises:
            UnknownWorkerError: nobody's id is, or begins with, `worker_id`.
            RoleChangeRefusedError: it is not ready.
            ValueError: the id is empty or begins several.
        """
        pool, worker = find_worker(self._pools.values(), worker_id)
        check_ready(worker, "can be drained")
        log.info("worker %s (%s) is drained by hand", worker.name, worker.known_id)
        worker.leaves = True
        if any(not w.leaves for w in pool.in_state(WorkerState.READY)):
            self._drain(worker, now_s)
        self.step(now_s)
        return worker.known_id

    def drain_workers(self, names: Iterable[str], now_s: float) -> list[str]:
        """All of them go, in whatever state they are, and others are started; their ids."""
        ids = []
        for name in names:
            pool, worker = self._find(name)
            if pool is None or worker is None:
                continue
            ids.append(worker.known_id)
            if worker.state is WorkerState.READY:
                log.info("worker %s (%s) is drained with its node", name, worker.known_id)
                self._drain(worker, now_s)
            elif worker.state is WorkerState.STARTING:
                self._end(pool, worker, "its node is drained", now_s, failed=False)
            worker.becomes = None  # else it would go on, there, in another pool
        self.step(now_s)
        return ids

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
        log.info("worker %s (%s) is ready", worker.name, worker.known_id)
        if self._num_gone[pool.role]:
            self._num_gone[pool.role] -= 1
            self._news.append(
                f"{pool.role} worker {worker.known_id} is ready in the place of a lost one"
            )
        self.step(now_s)

    def on_leaving(self, name: str, now_s: float) -> None:
        """The worker's process was told to end: it drains, and is replaced at once."""
        pool, worker = self._find(name)
        if pool is None or worker is None or worker.state is not WorkerState.READY:
            return
        worker.move(WorkerState.DRAINING, now_s)
        self._publish_changes()
        self._launcher.drain(name, self._options.drain_timeout_s)
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

    def pardon(self, name: str, now_s: float) -> None:
        """This worker, whose end is known, ended because its node was lost: no failed start."""
        for pool in self._pools.values():
            pool.pardon(name)
        self.step(now_s)

    def on_drained(self, name: str, now_s: float) -> None:
        """The worker has nothing left to do."""
        pool, worker = self._find(name)
        if pool is None or worker is None:
            return
        if worker.becomes is not None and not self._closed and self._wants(worker.becomes):
            self._rebuild(pool, worker, worker.becomes, now_s)
        else:
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
        return [self._pool_status(pool, now_s) for pool in self._shown_pools()]

    def ready_ids(self, role: Role) -> tuple[str, ...]:
        """Worker ids of the pool that serve and do not drain."""
        ready = self._pools[role].in_state(WorkerState.READY)
        return tuple(w.endpoint.worker_id for w in ready if w.endpoint is not None)

    def size_of(self, role: Role) -> PoolSize:
        """Of one pool, for the autoscaler."""
        pool = self._pools[role]
        return PoolSize(
            target=pool.target,
            ready=len(pool.in_state(WorkerState.READY)),
            starting=len(pool.in_state(WorkerState.STARTING)),
        )

    def hopeless(self) -> str:
        """Why a pool cannot reach its target by itself any more; empty while it may."""
        for pool in self._pools.values():
            ready = len(pool.in_state(WorkerState.READY))
            if ready < pool.target and (pool.num_lost or pool.gives_up(self._options)):
                row = pool.failed_starts
                return pool.last_failure + (f"; {row} starts failed in a row" if row > 1 else "")
        return ""

    def _pool_status(self, pool: Pool, now_s: float) -> cluster_pb2.PoolStatus:
        waiting = [
            text
            for worker in pool.in_state(WorkerState.STARTING)
            if (text := self._launcher.waiting_for(worker.name))
        ]
        message = describe(pool, now_s, self._options, waiting, self._num_arriving(pool))
        return pool_status(pool, "; ".join(text for text in (message, self._held) if text))

    def _shown_pools(self) -> list[Pool]:
        """Without a colocated one that nobody asked for."""
        return [
            pool
            for pool in self._pools.values()
            if pool.role != "colocated" or pool.target or pool.workers
        ]

    def _targets(self) -> dict[Role, int]:
        return {pool.role: pool.target for pool in self._shown_pools()}

    def _start(self, pool: Pool, now_s: float) -> None:
        worker = self._new_worker(pool, now_s)
        log.info("worker %s starts", worker.name)
        self._launcher.start(worker.name, pool.role)

    def _new_worker(self, pool: Pool, now_s: float) -> WorkerRecord:
        self._num_started[pool.role] += 1
        name = f"{pool.role}-{self._num_started[pool.role]}"
        worker = pool.workers[name] = WorkerRecord(name, pool.role, WorkerState.STARTING, now_s)
        self._remember_changes()
        return worker

    def _drain(self, worker: WorkerRecord, now_s: float) -> None:
        worker.move(WorkerState.DRAINING, now_s)
        # The router first: it must send nothing new to a worker that refuses it.
        self._publish_changes()
        drain = self._launcher.drain if worker.becomes is None else self._launcher.retire
        drain(worker.name, self._options.drain_timeout_s)

    # A change of role: the worker drains in one pool, and starts in the other.

    def _num_arriving(self, pool: Pool) -> int:
        return sum(w.becomes == pool.role for p in self._pools.values() for w in p.workers.values())

    def _wants(self, role: Role) -> bool:
        pool = self._pools[role]
        there = pool.in_state(WorkerState.STARTING, WorkerState.READY)
        return len(there) < pool.target

    def _rebuild(self, pool: Pool, worker: WorkerRecord, role: Role, now_s: float) -> None:
        pool.remove(worker, now_s)
        self._publish_changes()
        successor = self._new_worker(self._pools[role], now_s)
        successor.predecessor = worker.known_id
        log.info("worker %s (%s) goes on as %s", worker.name, worker.known_id, successor.name)
        self._launcher.rebuild(worker.name, successor.name, role)

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
        level = logging.INFO if worker.state is WorkerState.DRAINING else logging.WARNING
        log.log(level, "worker %s (%s) ended: %s", worker.name, worker.known_id, reason)
        if worker.state is WorkerState.READY and not self._closed:
            self._news.append(f"{pool.role} worker {worker.known_id} is lost: {reason}")
            self._num_gone[pool.role] += 1
        pool.note_end(worker, reason, now_s, self._options, failed=failed, permanent=permanent)
        pool.remove(worker, now_s)
        self._publish_changes()  # before the kill: nothing new may go there
        self._launcher.kill(worker.name)

    def _find(self, name: str) -> tuple[Pool | None, WorkerRecord | None]:
        for pool in self._pools.values():
            if name in pool.workers:
                return pool, pool.workers[name]
        return None, None

    def _remember_changes(self) -> None:
        memory = ControllerMemory.of(self._pools.values(), self._num_started, closed=self._closed)
        if memory != self._remembered:
            self._remembered = memory
            self._remember(memory)

    def _publish_changes(self) -> None:
        self._remember_changes()
        endpoints = self.endpoints()
        if endpoints != self._published:
            self._published = endpoints
            self._publish(endpoints)


def _checked_role(role: Role) -> Role:
    if role not in ROLES:
        raise ValueError(f"pool must be {' or '.join(ROLES)}, got {role!r}")
    return role


def _checked_size(role: Role, size: int) -> int:
    _checked_role(role)
    if not 0 <= size <= MAX_POOL_SIZE:
        raise ValueError(f"{role} must be in [0, {MAX_POOL_SIZE}], got {size}")
    return size
