"""WorkerActor: one worker in a process that Ray has placed."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import ray

from legato.cluster.actors.logs import begin_logging
from legato.cluster.actors.orphan_watch import end_with_controller
from legato.cluster.actors.termination import at_sigterm
from legato.cluster.actors.worker_process import WorkerProcess
from legato.cluster.adoption import FoundWorker
from legato.cluster.launcher import StartedWorker
from legato.cluster.pool import ControllerOptions

if TYPE_CHECKING:
    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.control_plane import Role
    from legato.worker.config import WorkerConfig

EXIT_SECOND_SIGNAL = 130
# After its drain, for the controller to end the process; then it does so itself.
END_ALONE_S = 5.0


def worker_config(role: Role, plan: WorkerPlan) -> WorkerConfig:
    """What one worker is told, on the machine where it runs."""
    from legato.worker.config import WorkerConfig

    engine, place = plan.engines[role], plan.placements[role]
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
        otlp_endpoint=engine.otlp_endpoint,
        max_batch_size=engine.max_batch_size,
        context_length=engine.context_length,
        num_threads=place.num_threads,
        access=plan.access,
    )


class WorkerActor:
    """Hosts one WorkerServer in the actor's event loop."""

    def __init__(self) -> None:
        self._server: Any = None
        self._role: Role | None = None
        self._address = ""
        self._starting: asyncio.Task[StartedWorker] | None = None
        self._loading = ""
        self._measures = False
        self._leaving = asyncio.Event()  # SIGTERM came
        self._ending: asyncio.Task[None] | None = None
        self._watch_controller: asyncio.Task[None] | None = None

    async def placed(self) -> WorkerProcess:
        """Answers as soon as Ray has found a place."""
        if self._watch_controller is None:
            self._watch_controller = asyncio.create_task(end_with_controller())
        me = psutil.Process()
        return WorkerProcess(ray.get_runtime_context().get_node_id(), me.pid, me.create_time())

    async def start(self, role: Role, plan: WorkerPlan) -> StartedWorker:
        """Loads the model and serves; raises ValueError or OSError where the model is wrong.

        Of one that serves: ends that, and serves again in another role with the model it has.
        Asked again for the same role, by a controller whose process is another now, it goes on as
        it was asked first.
        """
        if role != self._role:
            self._role = role
            self._starting = asyncio.create_task(self._start(role, plan))
        assert self._starting is not None, "it has a role"
        return await asyncio.shield(self._starting)

    async def who(self, name: str) -> FoundWorker:
        """What a new controller must know of it."""
        starting = self._starting
        serves = starting is not None and starting.done() and starting.exception() is None
        return FoundWorker(
            name,
            answered=True,
            role=self._role,
            started=self._started() if serves else None,
            draining=serves and self._server.phase.name == "DRAINING",
        )

    async def _start(self, role: Role, plan: WorkerPlan) -> StartedWorker:
        # Here, not above: the router's and the controller's processes need no torch.
        from legato.worker.server import WorkerServer
        from legato.worker.spare_memory import keep_objects

        begin_logging()
        config = worker_config(role, plan)
        if self._server is None:
            server = WorkerServer(config, on_progress=partial(self._note_progress, config))
        else:
            await self._server.stop(0)
            server = await self._server.successor(config)
        address = await server.start()
        keep_objects()
        self._server, self._address = server, address
        loop = asyncio.get_running_loop()
        at_sigterm(lambda: loop.call_soon_threadsafe(self._leave))
        return self._started()

    def _started(self) -> StartedWorker:
        return StartedWorker(
            self._server.worker_id, self._address, os.getpid(), socket.gethostname()
        )

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

    async def leaving(self) -> None:
        """Returns when the process was told to end: it drains."""
        await self._leaving.wait()

    def _leave(self) -> None:
        if self._leaving.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        self._leaving.set()
        self._ending = asyncio.get_running_loop().create_task(self._end_alone())

    async def _end_alone(self) -> None:
        """The controller, which knows by then, ends it first, unless that is lost."""
        await self._server.drain(ControllerOptions().drain_timeout_s)
        await asyncio.sleep(END_ALONE_S)
        os._exit(0)

    async def watch(self) -> None:
        """Never returns: the call fails at the moment when the process ends."""
        await asyncio.Event().wait()


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
    return address
