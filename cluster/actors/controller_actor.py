"""ControllerActor: the controller in a process of its own, driven by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import RayError

from legato.cluster.actors.calls import first_sentence
from legato.cluster.actors.head_store import HeadStore, forget
from legato.cluster.actors.launcher import STOP_GRACE_S, RayLauncher
from legato.cluster.actors.logs import begin_logging
from legato.cluster.actors.worker_process import WorkerProcess
from legato.cluster.autoscale_loop import AutoscaleLoop
from legato.cluster.controller import Controller
from legato.cluster.owner_watch import OwnerProcess, OwnerWatch, is_running

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.control_plane import Role, WorkerEndpoint
    from legato.cluster.pool import ControllerOptions
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad

STEP_PERIOD_S = 0.2
HEAD_PERIOD_S = 1.0
HEAD_SILENCE_S = 5.0
FLUSH_TIMEOUT_S = 5.0  # before a command is answered
FOLLOW_S = 10.0  # at most so long is a router's question for news held
HEAD_LOST = (
    "Ray's head (gcs_server) does not answer: what runs serves on, what is lost is not replaced, "
    "and pools keep their size"
)

log = logging.getLogger(__name__)


class ControllerActor:
    """Hosts the Controller, and drives it by the clock.

    Ray restarts its process where that ends. The workers are no children of it: the new process
    finds them by their names and takes them over, while the routers go on with the last list that
    they were given. Whatever fails in here unforeseen ends the process, to the same effect.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it, on the loop that the calls run on
        self,
        plan: WorkerPlan,
        targets: Mapping[Role, int],
        options: ControllerOptions,
        owner: OwnerProcess,
    ) -> None:
        begin_logging()
        context = ray.get_runtime_context()
        me = psutil.Process()
        self._process = WorkerProcess(context.get_node_id(), me.pid, me.create_time())
        self._namespace: str = context.namespace
        self._store = HeadStore(self._namespace)
        self._launcher = RayLauncher(plan, self._namespace, self._store)
        self._controller = Controller(
            self._launcher, self._note_change, targets, options, self._store.note
        )
        self._launcher.controller = self._controller
        self._autoscale: AutoscaleLoop | None = None
        if options.autoscale is not None:
            self._autoscale = AutoscaleLoop(
                options.autoscale, self._controller, time.monotonic(), self._flip
            )
        self._owner = owner
        self._owner_watch = OwnerWatch(time.monotonic(), seen=self._sees_owner())
        # (of which process, how often it has changed), and the list itself.
        self._snapshot: tuple[tuple[int, int], tuple[WorkerEndpoint, ...]]
        self._snapshot = (time.time_ns(), 0), ()
        self._changed = asyncio.Event()
        self._adopted = asyncio.Event()
        self._flush: asyncio.Task[None] | None = None
        works = (self._run(), self._watch_head(), self._launcher.watch_nodes())
        self._tasks = {asyncio.create_task(self._or_exit(work)) for work in works}

    # --- the owner's side ---------------------------------------------------------------------

    async def beat(self) -> tuple[WorkerProcess, bool, list[str]]:
        """The owner lives; tells it where this process is, whether Ray's head is lost, and the news
        of workers.
        """
        self._owner_watch.beat(time.monotonic())
        return self._process, self._launcher.head_lost, self._controller.take_news()

    async def head_lost(self) -> None:
        """The owner saw the head's process end."""
        self._hold(HEAD_LOST)

    async def hopeless(self) -> str:
        """See Controller.hopeless and RayLauncher.hopeless."""
        await self._adopted.wait()
        return self._controller.hopeless() or self._launcher.hopeless()

    async def stop_workers(self, grace_s: float) -> None:
        """Ends every worker and starts no other."""
        self._controller.close()
        if self._adopted.is_set():
            await self._launcher.stop_all(grace_s)

    # --- the routers' side --------------------------------------------------------------------

    async def workers(
        self, known: tuple[int, int] | None
    ) -> tuple[tuple[int, int], tuple[WorkerEndpoint, ...]]:
        """The list and its version, as soon as it is another than the one known, and at the latest
        after FOLLOW_S. Never before all workers of an earlier controller are taken over.
        """
        await self._adopted.wait()
        if self._snapshot[0] == known:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), FOLLOW_S)
        return self._snapshot

    async def pools(self) -> list[bytes]:
        """Of all pools, as messages: their wire form is stable, their Python form is not."""
        await self._adopted.wait()
        return [pool.SerializeToString() for pool in self._controller.pools(time.monotonic())]

    async def scale(self, targets: Mapping[Role, int]) -> dict[Role, int]:
        """See AutoscaleLoop.scale_by_hand, Controller.set_targets; ConnectionError where they
        could not be kept.
        """
        await self._begin_order()
        scaler, now_s = self._autoscale, time.monotonic()
        if scaler is not None:
            result = scaler.scale_by_hand(targets, now_s)
        else:
            result = self._controller.set_targets(targets, now_s)
        await self._keep_order()
        return result

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """See Controller.change_role; ConnectionError as of `scale`."""
        await self._begin_order()
        change = self._controller.change_role(worker_id, role, time.monotonic())
        if self._autoscale is not None:
            self._autoscale.note_role_change(time.monotonic())
        await self._keep_order()
        return change

    async def drain_worker(self, worker_id: str) -> str:
        """See Controller.drain_worker; ConnectionError as of `scale`."""
        await self._begin_order()
        full_id = self._controller.drain_worker(worker_id, time.monotonic())
        await self._keep_order()
        return full_id

    async def drain_node(self, node: str) -> list[str]:
        """See ClusterNodes.close and Controller.drain_workers; ConnectionError as of `scale`."""
        await self._begin_order()
        names = await self._launcher.close_node(node, self._owner.node_id)
        ids = self._controller.drain_workers(names, time.monotonic())
        await self._keep_order()
        return ids

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See Controller.report_lost."""
        await self._adopted.wait()
        self._controller.report_lost(worker_id, reason, time.monotonic())

    async def report_load(self, load: RouterLoad) -> None:
        """See AutoscaleLoop.note_load."""
        if self._autoscale is not None:
            self._autoscale.note_load(load, time.monotonic())

    async def autoscaler(self) -> bytes:
        """See AutoscaleLoop.status; as `pools`."""
        assert self._autoscale is not None, "routers ask where the pools are autoscaled"
        return self._autoscale.status(time.monotonic()).SerializeToString()

    # --- its own life -------------------------------------------------------------------------

    async def _run(self) -> None:
        memory = await self._store.memory()
        if memory is not None:
            found = await self._launcher.find()
            self._controller.adopt(memory, found, time.monotonic())
        self._adopted.set()
        while not self._owner_watch.is_gone(time.monotonic(), seen=self._sees_owner()):
            now_s = time.monotonic()
            self._controller.step(now_s)
            if self._autoscale is not None and not self._launcher.head_lost:
                self._autoscale.step(now_s)
            if self._store.is_behind:
                self._flushing()
            await asyncio.sleep(STEP_PERIOD_S)
        log.warning("the owner of the service is gone: all of it ends")
        self._controller.close()
        await self._launcher.stop_all(STOP_GRACE_S)
        if not self._launcher.head_lost:
            await asyncio.to_thread(forget, self._namespace)
            me = ray.get_runtime_context().current_actor
            await asyncio.to_thread(ray.kill, me, no_restart=True)
        os._exit(0)  # should Ray not have done it

    async def _watch_head(self) -> None:
        await self._adopted.wait()
        while True:
            asking = asyncio.create_task(self._ask_head())
            while not asking.done():
                await asyncio.wait({asking}, timeout=HEAD_SILENCE_S)
                if not asking.done():
                    self._hold(HEAD_LOST)
            self._hold(asking.result())
            await asyncio.sleep(HEAD_PERIOD_S)

    async def _ask_head(self) -> str:
        """What is wrong with it; empty where it answers. Most calls wait for one that is lost."""
        try:
            await self._store.ping()
        except RayError as error:
            return f"{HEAD_LOST} ({first_sentence(str(error))})"
        return ""

    async def _or_exit(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("the controller failed: its process ends, and starts again")
            logging.shutdown()
            os._exit(1)

    async def _begin_order(self) -> None:
        await self._adopted.wait()
        if self._launcher.head_lost:
            raise ConnectionError(HEAD_LOST)

    async def _keep_order(self) -> None:
        number = self._store.num_noted  # what is noted while this waits is another order's
        await asyncio.wait({self._flushing()}, timeout=FLUSH_TIMEOUT_S)
        if not self._store.has_kept(number):
            raise ConnectionError(HEAD_LOST)

    def _flip(self, worker_id: str, role: Role) -> None:
        self._controller.change_role(worker_id, role, time.monotonic())

    def _hold(self, reason: str) -> None:
        if bool(reason) != self._launcher.head_lost:
            log.warning(reason or "Ray's head answers again")
        self._launcher.head_lost = bool(reason)
        self._controller.hold(reason)

    def _sees_owner(self) -> bool:
        return self._owner.node_id == self._process.node_id and is_running(self._owner)

    def _flushing(self) -> asyncio.Task[None]:
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._try_flush())
        return self._flush

    async def _try_flush(self) -> None:
        try:
            await self._store.flush()
        except RayError:
            log.exception("the controller's memory was not kept; tried again")

    def _note_change(self, endpoints: tuple[WorkerEndpoint, ...]) -> None:
        process, number = self._snapshot[0]
        self._snapshot = (process, number + 1), endpoints
        self._changed.set()
        self._changed = asyncio.Event()
