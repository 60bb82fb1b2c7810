"""RayLauncher: starts, drains and ends workers as actors of Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from legato.cluster.actors.calls import CALL_TIMEOUT_S, first_sentence, result_of
from legato.cluster.actors.worker_actor import WorkerActor
from legato.cluster.actors.worker_process import WorkerProcess, make_sure_it_ended
from legato.cluster.adoption import FoundWorker

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from legato.cluster.actors.head_store import HeadStore
    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.control_plane import Role
    from legato.cluster.controller import Controller, StartedWorker

LOADING_POLL_S = 0.5  # between two looks at how far a starting worker is
STOP_GRACE_S = 2.0
CONTROLLER_NAME = "controller"  # in the service's namespace; all other names there are workers'


class RayLauncher:
    """The controller's Launcher: workers as Ray actors, which do not end with this process.

    They are found again by their names in `namespace`. What needs Ray's head is called in a thread,
    or not at all while the head is lost: such calls do not return before it is back.
    """

    def __init__(self, plan: WorkerPlan, namespace: str, store: HeadStore) -> None:
        self._plan = plan
        self._namespace = namespace
        self._store = store
        self.controller: Controller  # set by the actor that builds both
        self.head_lost = False
        self._wanted: set[str] = set()  # started or taken over, and not killed
        self._kills: set[asyncio.Task[None]] = set()
        self._handles: dict[str, Any] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._ended: set[str] = set()  # Ray has told that the process is gone
        self._loading: dict[str, str] = {}  # how far a starting worker is, in words
        self._tasks: set[asyncio.Task[None]] = set()
        self.shortage = ""  # what the cluster lacks, in words

    def start(self, name: str, role: Role) -> None:
        """See Launcher."""
        place = self._plan.placement
        worker = ray.remote(WorkerActor).options(
            num_cpus=place.cpus,
            num_gpus=place.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD" if self._plan.spread else "DEFAULT",
            name=name,
            namespace=self._namespace,
            lifetime="detached",
        )
        self._wanted.add(name)
        self._spawn(self._begin(name, role, worker))

    def adopt(self, name: str, role: Role) -> None:
        """See Launcher. `find` has found it."""
        self._spawn(self._live(name, role))

    async def find(self) -> list[FoundWorker]:
        """The workers that an earlier controller's process has left, asked all at once."""
        listed = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = [
            actor["name"]
            for actor in listed
            if actor["namespace"] == self._namespace and actor["name"] != CONTROLLER_NAME
        ]
        found = await asyncio.gather(*(self._ask_who(name) for name in names))
        return [worker for worker in found if worker is not None]

    def drain(self, name: str, timeout_s: float) -> None:
        """See Launcher."""
        self._spawn(self._drain(name, timeout_s))

    def kill(self, name: str) -> None:
        """See Launcher."""
        self._wanted.discard(name)
        handle, process = self._handles.pop(name, None), self._processes.pop(name, None)
        has_ended = name in self._ended
        self._ended.discard(name)
        if handle is None:
            return  # `stop_all` came first, or Ray has yet to take note of it: see `_begin`
        if not self.head_lost:
            killing = asyncio.get_running_loop().create_task(self._kill(name, handle))
            self._kills.add(killing)
            killing.add_done_callback(self._kills.discard)
        if process is not None and not has_ended:
            self._spawn(make_sure_it_ended(process, at_once=self.head_lost))

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
        self._wanted.clear()
        stops = [
            asyncio.ensure_future(result_of(self._handles[n].stop.remote(grace_s))) for n in names
        ]
        if stops:
            # Whether one answered or not, the kill below ends it.
            await asyncio.wait(stops, timeout=grace_s + 1)
        for name in names:
            self.kill(name)
        if self._kills:
            await asyncio.wait(tuple(self._kills), timeout=STOP_GRACE_S)

    async def _begin(self, name: str, role: Role, worker: Any) -> None:  # noqa: ANN401  # Ray's actor classes have no static type
        # First what the next controller needs to find it, then the worker.
        await self._store.flush()
        if name not in self._wanted:
            return
        try:
            handle = await asyncio.to_thread(worker.remote)
        except (RayError, ValueError) as error:  # ValueError: the name is taken
            self._dead(name, f"Ray does not start it: {first_sentence(str(error))}")
            return
        if name not in self._wanted:
            await self._kill(name, handle)
            return
        self._handles[name] = handle
        await self._live(name, role)

    async def _ask_who(self, name: str) -> FoundWorker | None:
        """None: it ended just now."""
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return None
        self._handles[name] = handle
        self._wanted.add(name)
        try:
            found: FoundWorker = await asyncio.wait_for(handle.who.remote(name), CALL_TIMEOUT_S)
        except ActorDiedError:
            self.kill(name)
            return None
        except (RayActorError, TimeoutError):
            process = await self._store.recall(_process_key(name))
            if process is not None:  # Ray has placed it: it may hang
                self._processes[name] = WorkerProcess(**process)
            return FoundWorker(name, answered=False)
        return found

    async def _live(self, name: str, role: Role) -> None:
        handle = self._handles[name]
        try:
            self._processes[name] = process = await handle.placed.remote()
            # Beside the start: a head that is lost must not hold it up.
            self._spawn(self._store.keep(_process_key(name), dataclasses.asdict(process)))
            started = await self._started(name, handle, role)
            self.controller.on_ready(name, started, time.monotonic())
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

    async def _kill(self, name: str, handle: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        await asyncio.to_thread(ray.kill, handle, no_restart=True)
        await self._store.drop(_process_key(name))

    def _dead(self, name: str, reason: str, *, permanent: bool = False) -> None:
        self.controller.on_dead(name, reason, time.monotonic(), permanent=permanent)
        self._ended.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _process_key(name: str) -> str:
    return f"process-{name}"
