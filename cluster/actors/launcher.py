"""RayLauncher: starts, drains and ends workers as actors of Ray."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from legato.cluster.actors.calls import first_sentence, result_of
from legato.cluster.actors.worker_actor import WorkerActor
from legato.cluster.actors.worker_process import make_sure_it_ended

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.actors.worker_process import WorkerProcess
    from legato.cluster.control_plane import Role
    from legato.cluster.controller import Controller, StartedWorker

LOADING_POLL_S = 0.5  # between two looks at how far a starting worker is
STOP_GRACE_S = 2.0


class RayLauncher:
    """The controller's Launcher: workers as Ray actors, owned by this process."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self.controller: Controller  # set by the actor that builds both
        self._handles: dict[str, Any] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._ended: set[str] = set()  # Ray has told that the process is gone
        self._loading: dict[str, str] = {}  # how far a starting worker is, in words
        self._tasks: set[asyncio.Task[None]] = set()
        self.shortage = ""  # what the cluster lacks, in words

    def start(self, name: str, role: Role) -> None:
        """See Launcher."""
        place = self._plan.placement
        self._handles[name] = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=place.cpus,
                num_gpus=place.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD" if self._plan.spread else "DEFAULT",
            )
            .remote()
        )
        self._spawn(self._live(name, role))

    def drain(self, name: str, timeout_s: float) -> None:
        """See Launcher."""
        self._spawn(self._drain(name, timeout_s))

    def kill(self, name: str) -> None:
        """See Launcher."""
        handle = self._handles.pop(name, None)
        if handle is None:
            return  # `stop_all` came first
        ray.kill(handle, no_restart=True)
        process = self._processes.pop(name, None)
        if name in self._ended:
            self._ended.discard(name)
        elif process is not None:
            self._spawn(make_sure_it_ended(process))

    def waiting_for(self, name: str) -> str:
        """See Launcher."""
        if name in self._processes:
            return self._loading.get(name, "")
        return self.shortage if name in self._handles else ""

    async def look_for_shortage(self) -> None:
        """Compares what a worker asks with what the cluster has; Ray itself says nothing."""
        place = self._plan.placement
        needs = {"CPU": place.cpus, "GPU": place.gpus}
        total = await asyncio.to_thread(ray.cluster_resources)
        free = await asyncio.to_thread(ray.available_resources)
        lacks = [
            f"waiting for {need:g} {kind}: the cluster has {total.get(kind, 0):g}, "
            f"{free.get(kind, 0):g} of them free"
            for kind, need in needs.items()
            if need > free.get(kind, 0)
        ]
        self.shortage = "; ".join(lacks)

    async def stop_all(self, grace_s: float) -> None:
        """Ends every worker, politely first."""
        names = list(self._handles)
        stops = [
            asyncio.ensure_future(result_of(self._handles[n].stop.remote(grace_s))) for n in names
        ]
        if stops:
            # Whether one answered or not, the kill below ends it.
            await asyncio.wait(stops, timeout=grace_s + 1)
        for name in names:
            self.kill(name)

    async def _live(self, name: str, role: Role) -> None:
        handle = self._handles[name]
        try:
            self._processes[name] = await handle.placed.remote()
            started = await self._started(name, handle, role)
            self.controller.on_ready(name, started, time.monotonic())
            self._spawn(self._await_leaving(name, handle))
            await handle.watch.remote()
        except RayActorError as error:
            self._ended.add(name)
            self._dead(name, f"its process ended: {first_sentence(str(error))}")
        except RayTaskError as error:
            # Wrong models and settings stay wrong; anything else may go better next time.
            permanent = isinstance(error.cause, (ValueError, OSError))
            self._dead(name, str(error.cause) or repr(error.cause), permanent=permanent)
        except RayError as error:
            self._dead(name, first_sentence(str(error)))

    async def _started(self, name: str, handle: Any, role: Role) -> StartedWorker:  # noqa: ANN401  # an actor handle has no static type
        start = asyncio.ensure_future(result_of(handle.start.remote(role, self._plan)))
        try:
            while not start.done():
                await asyncio.wait({start}, timeout=LOADING_POLL_S)
                if not start.done():
                    self._loading[name] = await handle.loading.remote()
        except RayActorError:
            pass  # `start` has failed for the same reason, and says so
        finally:
            self._loading.pop(name, None)
        worker: StartedWorker = await start
        return worker

    async def _await_leaving(self, name: str, handle: Any) -> None:  # noqa: ANN401  # as above
        try:
            await handle.leaving.remote()
        except RayError:
            return  # `_live` reports the death
        self.controller.on_leaving(name, time.monotonic())

    async def _drain(self, name: str, timeout_s: float) -> None:
        handle = self._handles[name]
        try:
            await asyncio.wait_for(handle.drain.remote(timeout_s), timeout_s + 1)
            await asyncio.wait_for(handle.stop.remote(STOP_GRACE_S), STOP_GRACE_S + 1)
        except RayActorError:
            return  # `_live` reports the death
        except (RayError, TimeoutError) as error:
            self._dead(name, f"its drain failed: {first_sentence(str(error))}")
            return
        self.controller.on_drained(name, time.monotonic())

    def _dead(self, name: str, reason: str, *, permanent: bool = False) -> None:
        self.controller.on_dead(name, reason, time.monotonic(), permanent=permanent)
        self._ended.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
