"""Actors: every Ray call of Legato. Ray starts, places and watches processes; tokens go over gRPC.

Ownership is a chain: the process of `legato serve` owns the router and the controller, and the
controller owns the workers. Ray ends what an ended process owned, so nothing outlives the chain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.controller import Controller, StartedWorker
from legato.cluster.placement import ClusterFacts, WorkerPlacement
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from legato.cluster.config import EngineOptions, RouterOptions
    from legato.cluster.control_plane import Role, WorkerEndpoint
    from legato.cluster.pool import ControllerOptions
    from legato.worker.config import WorkerConfig

CALL_TIMEOUT_S = 5.0  # of one small call between actors
PUBLISH_TIMEOUT_S = 60.0  # the router may still be reading its tokenizer
STEP_PERIOD_S = 0.2
LOADING_POLL_S = 0.5  # between two looks at how far a starting worker is
STOP_GRACE_S = 2.0
KILL_CHECK_S = 2.0
OBJECT_STORE_BYTES = 80 << 20  # close to Ray's least: we put nothing in it


@dataclass(frozen=True)
class WorkerPlan:
    """Everything the controller needs to start any worker of the service."""

    model: str
    engines: Mapping[Role, EngineOptions]
    placement: WorkerPlacement
    spread: bool  # over the nodes of a joined cluster


@dataclass(frozen=True)
class RouterPlan:
    """Everything the router actor needs."""

    options: RouterOptions
    model_path: str
    model_name: str
    version: str
    owner_pid: int
    owner_host: str


@dataclass(frozen=True)
class _Process:
    node_id: str
    pid: int
    created_s: float


def worker_config(role: Role, plan: WorkerPlan) -> WorkerConfig:
    """What one worker is told, on the machine where it runs."""
    from legato.worker.config import WorkerConfig

    engine, place = plan.engines[role], plan.placement
    fraction = engine.kv_memory_fraction
    return WorkerConfig(
        model=plan.model,
        role=role,
        host=place.host or _node_address(),
        device=place.device,
        dtype=engine.dtype,
        kv_cache=engine.kv_cache,
        kv_lane=engine.kv_lane,
        kv_wire=engine.kv_wire,
        deterministic=engine.deterministic,
        weights=engine.weights,
        kv_memory_bytes=engine.kv_memory_bytes,
        kv_memory_fraction=None if fraction is None else fraction / place.sharers,
        swap_memory_bytes=engine.swap_memory_bytes,
        admission=engine.admission,
        admission_risk=engine.admission_risk,
        block_size=engine.block_size,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=engine.prefix_cache,
        max_batch_size=engine.max_batch_size,
        context_length=engine.context_length,
        num_threads=place.num_threads,
    )


class WorkerActor:
    """Hosts one WorkerServer in the actor's event loop."""

    def __init__(self) -> None:
        self._server: Any = None
        self._loading = ""
        self._measures = False

    async def placed(self) -> _Process:
        """Answers as soon as Ray has found a place."""
        me = psutil.Process()
        return _Process(ray.get_runtime_context().get_node_id(), me.pid, me.create_time())

    async def start(self, role: Role, plan: WorkerPlan) -> StartedWorker:
        """Loads the model and serves; raises ValueError or OSError where the model is wrong."""
        # Here, not above: the router's and the controller's processes need no torch.
        from legato.worker.server import WorkerServer
        from legato.worker.spare_memory import keep_objects

        # For what workers say at their start, in Ray's folder of logs.
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("legato").setLevel(logging.INFO)
        config = worker_config(role, plan)
        server = WorkerServer(config, on_progress=partial(self._note_progress, config))
        address = await server.start()
        keep_objects()
        self._server = server
        return StartedWorker(server.worker_id, address, os.getpid(), socket.gethostname())

    async def loading(self) -> str:
        """How far the start has come, in words; empty before weights are read."""
        return self._loading

    def _note_progress(self, config: WorkerConfig, num_read: int, num_tensors: int) -> None:
        self._loading = f"weights {10 * (10 * num_read // num_tensors)} %"
        if config.kv_memory_fraction is not None and num_read == num_tensors:  # may take long
            self._loading = "measuring what a step takes"

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work; returns when there is none left, or at the timeout."""
        await self._server.drain(timeout_s)

    async def stop(self, grace_s: float) -> None:
        """Ends the server; the process ends with the actor."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def watch(self) -> None:
        """Never returns: the call fails at the moment when the process ends."""
        await asyncio.Event().wait()


class RouterActor:
    """Hosts the Router."""

    def __init__(self) -> None:
        self._router: Any = None
        self._started = asyncio.Event()

    async def start(self, controller: Any, plan: RouterPlan) -> str:  # noqa: ANN401  # an actor handle has no static type
        """Serves the public address, and returns it."""
        from legato.cluster.router import Router
        from legato.cluster.text.model_text import ModelText

        text = await asyncio.to_thread(ModelText.load, Path(plan.model_path))
        self._router = Router(
            plan.options,
            text,
            RayControlPlane(controller),
            model_name=plan.model_name,
            version=plan.version,
            owner_pid=plan.owner_pid,
            owner_host=plan.owner_host,
        )
        address: str = await self._router.start()
        self._started.set()
        return address

    async def set_workers(self, workers: Sequence[WorkerEndpoint]) -> None:
        """The full list, as it is now."""
        await self._started.wait()
        await self._router.set_workers(workers)

    async def end(self, drain_timeout_s: float) -> None:
        """No new requests; running ones have `drain_timeout_s`; then the port closes."""
        if self._router is not None:
            await self._router.drain(drain_timeout_s)
            await self._router.stop()

    async def watch(self) -> None:
        """Never returns; see `WorkerActor.watch`."""
        await asyncio.Event().wait()


class RayControlPlane:
    """ControlPlane over calls to the controller actor; each ends within CALL_TIMEOUT_S."""

    def __init__(self, controller: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        self._controller = controller

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """See ControlPlane."""
        raw = await _bounded(self._controller.pools.remote())
        return [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """See ControlPlane; ValueError where a size is out of range."""
        result: dict[Role, int] = await _bounded(self._controller.scale.remote(dict(targets)))
        return result

    async def shutdown(self, drain_timeout_s: float) -> None:
        """See ControlPlane."""
        await _bounded(self._controller.shutdown.remote(drain_timeout_s))

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See ControlPlane."""
        await _bounded(self._controller.report_lost.remote(worker_id, reason))


async def _bounded(call: Any) -> Any:  # noqa: ANN401  # Ray's references have no static type
    try:
        return await asyncio.wait_for(call, CALL_TIMEOUT_S)
    except RayTaskError as error:
        # A refusal of the controller arrives wrapped in the remote traceback.
        if isinstance(error.cause, ValueError):
            raise ValueError(str(error.cause)) from error
        raise
    except RayActorError as error:
        raise ConnectionError("the controller is gone: the service is ending") from error
    except TimeoutError as error:
        raise TimeoutError(f"the controller gave no answer within {CALL_TIMEOUT_S:g} s") from error


class RayLauncher:
    """The controller's Launcher: workers as Ray actors, owned by this process."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self.controller: Controller  # set by the actor that builds both
        self._handles: dict[str, Any] = {}
        self._processes: dict[str, _Process] = {}
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
            self._spawn(_make_sure_it_ended(process))

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
        stops = [asyncio.ensure_future(_ref(self._handles[n].stop.remote(grace_s))) for n in names]
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
            await handle.watch.remote()
        except RayActorError as error:
            self._ended.add(name)
            self._dead(name, f"its process ended: {_first_sentence(str(error))}")
        except RayTaskError as error:
            # Wrong models and settings stay wrong; anything else may go better next time.
            permanent = isinstance(error.cause, (ValueError, OSError))
            self._dead(name, str(error.cause) or repr(error.cause), permanent=permanent)
        except RayError as error:
            self._dead(name, _first_sentence(str(error)))

    async def _started(self, name: str, handle: Any, role: Role) -> StartedWorker:  # noqa: ANN401  # an actor handle has no static type
        start = asyncio.ensure_future(_ref(handle.start.remote(role, self._plan)))
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
            self._dead(name, f"its drain failed: {_first_sentence(str(error))}")
            return
        self.controller.on_drained(name, time.monotonic())

    def _dead(self, name: str, reason: str, *, permanent: bool = False) -> None:
        self.controller.on_dead(name, reason, time.monotonic(), permanent=permanent)
        self._ended.discard(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
    return address


async def _ref(call: Any) -> Any:  # noqa: ANN401  # Ray's references have no static type
    return await call


def _first_sentence(text: str) -> str:
    """Ray's reports fill a screen; their exit detail is the part that says something."""
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else text).strip().split("\n")[0].split(". ")[0][:300]


def _end_process(process: _Process) -> None:
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.created_s) < 1:  # else the pid has been reused
            found.kill()
    except psutil.NoSuchProcess:
        return


async def _make_sure_it_ended(process: _Process) -> None:
    """Ray reports a killed actor dead at once, even where its process is stopped and lives on."""
    await asyncio.sleep(KILL_CHECK_S)
    if process.node_id == ray.get_runtime_context().get_node_id():
        _end_process(process)
        return
    there = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task = ray.remote(_end_process).options(num_cpus=0, scheduling_strategy=there)
    await asyncio.wait_for(task.remote(process), CALL_TIMEOUT_S)


class ControllerActor:
    """Hosts the Controller, and drives it by the clock."""

    def __init__(
        self, plan: WorkerPlan, targets: Mapping[Role, int], options: ControllerOptions
    ) -> None:
        self._launcher = RayLauncher(plan)
        self._controller = Controller(self._launcher, self._note_change, targets, options)
        self._launcher.controller = self._controller
        self._snapshot: tuple[WorkerEndpoint, ...] = ()
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._drain_timeout_s = 0.0

    async def run(self, router: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        """Reconciles until the actor ends. If it ever fails, the service ends."""
        publisher = asyncio.create_task(self._publish(router))
        shortage_s = time.monotonic() + 1
        while not publisher.done():
            now_s = time.monotonic()
            self._controller.step(now_s)
            if now_s >= shortage_s:
                await self._launcher.look_for_shortage()
                shortage_s = time.monotonic() + 1
            await asyncio.sleep(STEP_PERIOD_S)
        publisher.result()

    async def pools(self) -> list[bytes]:
        """Of both pools, as messages: their wire form is stable, their Python form is not."""
        return [pool.SerializeToString() for pool in self._controller.pools(time.monotonic())]

    async def scale(self, targets: Mapping[Role, int]) -> dict[Role, int]:
        """See Controller.set_targets."""
        return self._controller.set_targets(targets, time.monotonic())

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See Controller.report_lost."""
        self._controller.report_lost(worker_id, reason, time.monotonic())

    async def shutdown(self, drain_timeout_s: float) -> None:
        """Lets the owner know; it does the rest."""
        self._controller.close()
        self._drain_timeout_s = drain_timeout_s
        self._ending.set()

    async def shutdown_asked(self) -> float:
        """Returns when somebody asked for the end: the seconds given to running requests."""
        await self._ending.wait()
        return self._drain_timeout_s

    async def hopeless(self) -> str:
        """See Controller.hopeless."""
        return self._controller.hopeless()

    async def stop_workers(self, grace_s: float) -> None:
        """Ends every worker and starts no other."""
        self._controller.close()
        await self._launcher.stop_all(grace_s)

    def _note_change(self, endpoints: tuple[WorkerEndpoint, ...]) -> None:
        self._snapshot = endpoints
        self._changed.set()

    async def _publish(self, router: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        # One call at a time, always the newest list: calls to an async actor may overtake.
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.wait_for(router.set_workers.remote(self._snapshot), PUBLISH_TIMEOUT_S)


def resolve_model_path(source: str) -> Path:
    """The folder or file of a model, downloaded if need be; ValueError or OSError if it is none."""
    from legato.worker.weights.source import resolve_model

    path: Path = resolve_model(source)
    return path


class RayService:
    """The owner's side: Ray itself, the router's actor and the controller's. Not thread-safe."""

    def __init__(self) -> None:
        self._controller: Any = None
        self._router: Any = None
        self._address_call: Any = None
        self._shutdown_call: Any = None
        self._head: psutil.Process | None = None  # of our own Ray
        self._lifelines: dict[Any, str] = {}  # calls that end only where something is wrong

    def start_own(self, temp_dir: Path, num_actors: int) -> ClusterFacts:
        """Starts a Ray for this service alone; it ends with this process, however that ends."""
        # The kernel ties Ray's processes to the thread that starts them: this must be the main one.
        ray.init(
            address="local",
            num_cpus=num_actors,  # our actors ask for none; it is how many processes Ray readies
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=str(temp_dir),
            _node_ip_address="127.0.0.1",
        )
        children = psutil.Process().children()
        self._head = next((child for child in children if child.name() == "gcs_server"), None)
        return self._facts(joined=False)

    def join(self, address: str) -> ClusterFacts:
        """Joins the cluster at host:port, which `probe_ray` has found alive."""
        ray.init(address=address, configure_logging=False, log_to_driver=False)
        return self._facts(joined=True)

    def launch(
        self,
        worker_plan: WorkerPlan,
        router_plan: RouterPlan,
        targets: Mapping[Role, int],
        options: ControllerOptions,
    ) -> None:
        """Begins to start everything."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        settings = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
        self._controller = (
            ray.remote(ControllerActor).options(**settings).remote(worker_plan, targets, options)
        )
        self._router = ray.remote(RouterActor).options(**settings).remote()
        self._lifelines = {
            self._controller.run.remote(self._router): "the controller",
            self._router.watch.remote(): "the router",
        }
        self._address_call = self._router.start.remote(self._controller, router_plan)
        self._shutdown_call = self._controller.shutdown_asked.remote()

    def failure(self) -> str:
        """Why the service cannot go on; empty while it can."""
        # Ray itself gives up after a minute, and until then nothing lost is replaced.
        if self._head is not None and not _lives(self._head):
            return "Ray's head process (gcs_server) ended"
        done, _ = ray.wait(list(self._lifelines), timeout=0)
        for call in done:
            return f"{self._lifelines[call]} ended: {_outcome(call)}"
        return ""

    def router_address(self) -> str | None:
        """host:port once the router serves; ValueError or OSError where it cannot."""
        done, _ = ray.wait([self._address_call], timeout=0)
        if not done:
            return None
        try:
            address: str = ray.get(self._address_call)
        except RayTaskError as error:
            if isinstance(error.cause, (ValueError, OSError)):
                raise ValueError(str(error.cause)) from error
            raise
        return address

    def pools(self) -> list[cluster_pb2.PoolStatus]:
        """See Controller.pools."""
        raw = ray.get(self._controller.pools.remote(), timeout=CALL_TIMEOUT_S * 2)
        return [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    def hopeless(self) -> str:
        """See Controller.hopeless."""
        reason: str = ray.get(self._controller.hopeless.remote(), timeout=CALL_TIMEOUT_S * 2)
        return reason

    def shutdown_asked(self) -> float | None:
        """The seconds given to running requests, once somebody asked for the end."""
        done, _ = ray.wait([self._shutdown_call], timeout=0)
        if not done or self.failure():
            return None
        seconds: float = ray.get(self._shutdown_call)
        return seconds

    def begin_drain(self, drain_timeout_s: float) -> Any:  # noqa: ANN401  # Ray's references have no static type
        """Closes the router to new requests; `done` tells when the running ones have ended."""
        return self._router.end.remote(drain_timeout_s)

    def begin_stop(self) -> Any:  # noqa: ANN401  # Ray's references have no static type
        """Ends the workers."""
        return self._controller.stop_workers.remote(STOP_GRACE_S)

    def done(self, call: Any, timeout_s: float) -> bool:  # noqa: ANN401  # Ray's references have no static type
        """Waits for a call of `begin_...`; True when it has ended, well or not."""
        finished, _ = ray.wait([call], timeout=timeout_s)
        return bool(finished)

    def close(self) -> None:
        """Ends the actors, and Ray if it is our own."""
        for actor in (self._router, self._controller):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        ray.shutdown()

    def _facts(self, *, joined: bool) -> ClusterFacts:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray's
        return ClusterFacts(
            joined=joined,
            num_nodes=len([node for node in nodes if node["Alive"]]),
            num_gpus=resources.get("GPU", 0.0),
            num_cores=len(os.sched_getaffinity(0)),
        )


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _outcome(call: Any) -> str:  # noqa: ANN401  # Ray's references have no static type
    try:
        ray.get(call)
    except RayTaskError as error:
        return repr(error.cause)
    except RayError as error:
        return _first_sentence(str(error))
    return "without an error"
