"""RayLauncher: starts, drains and ends workers as actors of Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from legato.cluster.actors.calls import CALL_TIMEOUT_S, first_sentence, result_of
from legato.cluster.actors.cluster_nodes import ClusterNodes
from legato.cluster.actors.orphan_watch import CONTROLLER_NAME
from legato.cluster.actors.worker_actor import WorkerActor
from legato.cluster.actors.worker_process import WorkerProcess, make_sure_it_ended
from legato.cluster.adoption import FoundWorker
from legato.cluster.node_fit import never_fits, waits_for

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from legato.cluster.actors.head_store import HeadStore
    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.control_plane import Role
    from legato.cluster.controller import Controller
    from legato.cluster.launcher import StartedWorker

LOADING_POLL_S = 0.5  # between two looks at how far a starting worker is
STOP_GRACE_S = 2.0
NODE_LOOKS_S = (0.0, 0.5, 1.5)  # pauses: a node may go a moment after its workers
SUSPECT_S = 30.0  # longer than Ray takes to notice that a node is gone
HOPELESS_AFTER_S = 15.0  # a node may just be joining
NODE_ID_LABEL = "ray.io/node-id"


class RayLauncher:
    """The controller's Launcher: workers as Ray actors, which do not end with this process.

    They are found again by their names in `namespace`. What needs Ray's head is called in a thread,
    or not at all while the head is lost: such calls do not return before it is back.
    """

    def __init__(self, plan: WorkerPlan, namespace: str, store: HeadStore) -> None:
        self._plan = plan
        self._namespace = namespace
        self._store = store
        self.head_lost = False
        self._kills: set[asyncio.Task[None]] = set()
        self.controller: Controller  # set by the actor that builds both
        self._nodes = ClusterNodes()
        self._suspects: dict[str, float] = {}  # nodes where a worker died, and when
        self._roles: dict[str, Role] = {}  # of all that were started or found, and not killed
        self._actor_names: dict[str, str] = {}  # Ray's, where a change of role gave another here
        self._handles: dict[str, Any] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._ended: set[str] = set()  # Ray has told that the process is gone
        self._loading: dict[str, str] = {}  # how far a starting worker is, in words
        self._tasks: set[asyncio.Task[None]] = set()
        self._hopes_until_s = time.monotonic() + HOPELESS_AFTER_S

    def start(self, name: str, role: Role) -> None:
        """See Launcher."""
        self._roles[name] = role
        self._spawn(self._begin(name, role))

    def adopt(self, name: str, role: Role) -> None:
        """See Launcher. `find` has found it."""
        self._roles[name] = role
        self._spawn(self._live(name, role))

    def rebuild(self, name: str, new_name: str, role: Role) -> None:
        """See Launcher."""
        del self._roles[name]
        self._roles[new_name] = role
        self._actor_names[new_name] = self._actor_names.pop(name, name)
        self._handles[new_name] = self._handles.pop(name)
        self._processes[new_name] = self._processes.pop(name)
        self._spawn(self._begin_again(new_name, role))

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

    def obstacle(self, before: Role, after: Role) -> str:
        """See Launcher."""
        return self._plan.obstacle(before, after)

    def drain(self, name: str, timeout_s: float) -> None:
        """See Launcher."""
        self._spawn(self._drain(name, timeout_s, stops=True))

    def retire(self, name: str, timeout_s: float) -> None:
        """See Launcher."""
        self._spawn(self._drain(name, timeout_s, stops=False))

    def kill(self, name: str) -> None:
        """See Launcher."""
        self._roles.pop(name, None)
        handle, process = self._handles.pop(name, None), self._processes.pop(name, None)
        actor_name = self._actor_names.pop(name, name)
        ended = name in self._ended
        self._ended.discard(name)
        if handle is None:
            return  # `stop_all` came first, or Ray has yet to take note of it: see `_begin`
        if not self.head_lost:
            killing = asyncio.get_running_loop().create_task(self._kill(actor_name, handle))
            self._kills.add(killing)
            killing.add_done_callback(self._kills.discard)
        if process is not None:
            self._suspects[process.node_id] = time.monotonic()
            self._spawn(self._after(name, process, ended=ended))

    def waiting_for(self, name: str) -> str:
        """See Launcher."""
        if name in self._processes:
            return self._loading.get(name, "")
        if name not in self._roles or not self._nodes.nodes:
            return ""
        role = self._roles[name]
        return waits_for(role, self._plan.placements[role].demand, self._nodes.open)

    def lacks_room(self, name: str) -> bool:
        """See Launcher."""
        return name not in self._processes and bool(self.waiting_for(name))

    async def close_node(self, node: str, owners_id: str) -> list[str]:
        """See ClusterNodes.close; the names of the workers there."""
        node_id = await self._nodes.close(node, owners_id)
        return [name for name, process in self._processes.items() if process.node_id == node_id]

    async def watch_nodes(self) -> None:
        """Keeps the view of the cluster's nodes up to date; never returns."""
        await self._nodes.run()

    def hopeless(self) -> str:
        """Why a worker has no node, and gets none either unless somebody adds one; else empty."""
        if self._plan.nodes_may_come or not self._nodes.nodes:
            return ""
        if time.monotonic() < self._hopes_until_s:
            return ""
        waiting = {role for name, role in self._roles.items() if name not in self._processes}
        reasons = [
            never_fits(role, self._plan.placements[role].demand, self._nodes.nodes)
            for role in sorted(waiting)
        ]
        return next(filter(None, reasons), "")

    async def stop_all(self, grace_s: float) -> None:
        """Ends every worker, politely first."""
        names = list(self._roles)
        self._roles.clear()
        stops = [
            asyncio.ensure_future(result_of(handle.stop.remote(grace_s)))
            for handle in self._handles.values()
        ]
        if stops:
            # Whether one answered or not, the kill below ends it.
            await asyncio.wait(stops, timeout=grace_s + 1)
        for name in names:
            self.kill(name)
        if self._kills:
            await asyncio.wait(tuple(self._kills), timeout=STOP_GRACE_S)

    async def _begin(self, name: str, role: Role) -> None:
        # First what the next controller needs to find it, then the worker.
        await self._store.flush()
        await self._lost_lately()
        if name not in self._roles:
            return
        try:
            handle = await asyncio.to_thread(self._actor_class(name, role).remote)
        except (RayError, ValueError) as error:  # the name is taken, or Ray takes no such resources
            told = f"Ray does not start it: {first_sentence(str(error))}"
            self._dead(name, told, permanent=isinstance(error, ValueError))
            return
        if name not in self._roles:
            await self._kill(name, handle)
            return
        self._handles[name] = handle
        await self._live(name, role)

    async def _begin_again(self, name: str, role: Role) -> None:
        # As above: under which name the next controller looks for it.
        await self._store.keep(_name_key(self._actor_names[name]), name)
        await self._store.flush()
        if name in self._roles:
            await self._live(name, role)

    async def _ask_who(self, actor_name: str) -> FoundWorker | None:
        """None: it ended just now."""
        try:
            handle = await asyncio.to_thread(ray.get_actor, actor_name, self._namespace)
        except ValueError:
            return None
        name: str = await self._store.recall(_name_key(actor_name)) or actor_name
        if name != actor_name:
            self._actor_names[name] = actor_name
        self._handles[name] = handle
        try:
            found: FoundWorker = await asyncio.wait_for(handle.who.remote(name), CALL_TIMEOUT_S)
        except ActorDiedError:
            self.kill(name)
            return None
        except (RayActorError, TimeoutError):
            process = await self._store.recall(_process_key(actor_name))
            if process is not None:  # Ray has placed it: it may hang
                self._processes[name] = WorkerProcess(**process)
            return FoundWorker(name, answered=False)
        return found

    async def _live(self, name: str, role: Role) -> None:
        handle, actor_name = self._handles[name], self._actor_names.get(name, name)
        try:
            self._processes[name] = process = await handle.placed.remote()
            # Beside the start: a head that is lost must not hold it up.
            self._spawn(self._store.keep(_process_key(actor_name), dataclasses.asdict(process)))
            started = await self._started(name, handle, role)
            self.controller.on_ready(name, started, time.monotonic())
            # The calls that stay open: `ps` shows the process under the name of the last begun.
            shown = f"legato {role} worker"
            self._spawn(self._await_leaving(name, handle, shown))
            await handle.watch.options(name=shown).remote()
        except RayActorError as error:
            self._ended.add(name)
            placed = name in self._processes
            self._dead(name, f"its process ended: {first_sentence(str(error))}")
            if not placed and await self._lost_lately():
                # Ray had chosen a node for it that was going down.
                self.controller.pardon(name, time.monotonic())
        except RayTaskError as error:
            # Wrong models and settings stay wrong; anything else may go better next time.
            permanent = isinstance(error.cause, (ValueError, OSError))
            self._dead(name, str(error.cause) or repr(error.cause), permanent=permanent)
        except RayError as error:
            self._dead(name, first_sentence(str(error)))

    def _actor_class(self, name: str, role: Role) -> Any:  # noqa: ANN401  # Ray's actor classes have no static type
        """With what the worker asks of its place."""
        demand = self._plan.placements[role].demand
        labels = dict(demand.labels)
        if self._nodes.lost:
            # Ray would put it on a node of which it has not noticed yet that it is gone.
            labels.setdefault(NODE_ID_LABEL, f"!in({','.join(sorted(self._nodes.lost))})")
        return ray.remote(WorkerActor).options(
            num_cpus=demand.cpus,
            num_gpus=demand.gpus,
            memory=demand.memory_bytes,
            resources=dict(demand.custom),
            label_selector=labels,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD" if self._plan.spread else "DEFAULT",
            name=name,
            namespace=self._namespace,
            lifetime="detached",
        )

    async def _lost_lately(self) -> frozenset[str]:
        """Nodes that are gone, of those where a worker died a short while ago."""
        recent_s = time.monotonic() - SUSPECT_S
        self._suspects = {node: at_s for node, at_s in self._suspects.items() if at_s > recent_s}
        return await self._nodes.look_at(list(self._suspects))

    async def _after(self, name: str, process: WorkerProcess, *, ended: bool) -> None:
        """Sees whether a worker's whole node was lost, and that its process is no more."""
        if self.head_lost:  # and cannot be asked to kill it
            if not ended:
                await make_sure_it_ended(process)
            return
        for pause_s in NODE_LOOKS_S:
            await asyncio.sleep(pause_s)
            if await self._nodes.look_at([process.node_id]):
                self.controller.pardon(name, time.monotonic())
                return
        if not ended:
            await make_sure_it_ended(process)

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

    async def _await_leaving(self, name: str, handle: Any, shown: str) -> None:  # noqa: ANN401  # as above
        try:
            await handle.leaving.options(name=shown).remote()
        except RayError:
            return  # `_live` reports the death
        self.controller.on_leaving(name, time.monotonic())

    async def _drain(self, name: str, timeout_s: float, *, stops: bool) -> None:
        handle = self._handles[name]
        try:
            await asyncio.wait_for(handle.drain.remote(timeout_s), timeout_s + 1)
            if stops:
                await asyncio.wait_for(handle.stop.remote(STOP_GRACE_S), STOP_GRACE_S + 1)
        except RayActorError:
            return  # `_live` reports the death
        except (RayError, TimeoutError) as error:
            self._dead(name, f"its drain failed: {first_sentence(str(error))}")
            return
        self.controller.on_drained(name, time.monotonic())

    async def _kill(self, actor_name: str, handle: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        await asyncio.to_thread(ray.kill, handle, no_restart=True)
        await self._store.drop(_process_key(actor_name))
        await self._store.drop(_name_key(actor_name))

    def _dead(self, name: str, reason: str, *, permanent: bool = False) -> None:
        self.controller.on_dead(name, reason, time.monotonic(), permanent=permanent)
        self._ended.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _process_key(actor_name: str) -> str:
    return f"process-{actor_name}"


def _name_key(actor_name: str) -> str:
    return f"name-{actor_name}"
