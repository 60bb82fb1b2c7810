"""WorkerServer: a worker's life from loading to its end, behind one gRPC port."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import weakref
from typing import TYPE_CHECKING

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from legato.kernels import native
from legato.protos import kv_transfer_pb2, worker_pb2
from legato.protos.malformed import RefuseMalformed
from legato.protos.refuse_strangers import RefuseStrangers
from legato.protos.tracing import Tracing
from legato.worker.channel import SERVER_OPTIONS
from legato.worker.kv_budget import KvBudget, check_memory
from legato.worker.lifecycle import Lifecycle, Phase
from legato.worker.loading import choose_device, load_model
from legato.worker.node import WorkerNode
from legato.worker.sampler import launch_sample
from legato.worker.spare_memory import give_back_code, give_back_freed
from legato.worker.successor import check_same_weights, freed
from legato.worker.watchdog import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from legato.worker.config import WorkerConfig
    from legato.worker.engine import SampleFunction
    from legato.worker.loading import LoadedModel
    from legato.worker.services.kv_transfer import KvTransferService

_log = logging.getLogger(__name__)
EXIT_ENGINE_FAILED = 70
# After a failure: long enough for the calls to send their status, short enough not to linger.
_LAST_WORDS_S = 0.5
_ENGINE_STOP_TIMEOUT_S = 10.0
_SERVICES = (
    "",  # the server as a whole
    worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["DecodeWorker"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerControl"].full_name,
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name,
)


class StartError(OSError):
    """The worker cannot listen where it was told to."""


def _exit_process() -> None:
    logging.shutdown()
    # Not sys.exit: a thread that hangs in the engine must not keep a dead worker alive.
    os._exit(EXIT_ENGINE_FAILED)


class WorkerServer:
    """Loads, listens, drains, stops. All methods belong to one event loop.

    `on_progress` is told (tensors read, tensors in all) while the model loads, from another thread.
    A failed engine ends the process (`exit_process`): a worker that answers while its engine is
    dead would be given request after request.
    """

    def __init__(
        self,
        config: WorkerConfig,
        loaded: LoadedModel | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        sample: SampleFunction = launch_sample,
        exit_process: Callable[[], None] = _exit_process,
        step_timeout_s: float = 10.0,
        inherited_kv_bytes: int | None = None,
    ) -> None:
        """`loaded`: where the model need not be loaded any more. `inherited_kv_bytes`: see
        `KvBudget.of`.
        """
        self._config = config
        self._loaded = loaded
        self._on_progress = on_progress
        self._sample = sample
        self._exit_process = exit_process
        self._step_timeout_s = step_timeout_s
        self._kv_bytes = inherited_kv_bytes
        self._lifecycle = Lifecycle()
        self._health = health.aio.HealthServicer()
        self._node: WorkerNode | None = None
        self._server: grpc.aio.Server | None = None
        self._tracing: Tracing | None = None
        self._links: KvTransferService | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def worker_id(self) -> str:
        """Unique for ever; known after `start`."""
        return self.node.identity.worker_id

    @property
    def phase(self) -> Phase:
        """What the worker does at present."""
        return self._lifecycle.phase

    @property
    def node(self) -> WorkerNode:
        """The parts inside; there after `start`."""
        if self._node is None:
            raise RuntimeError("the worker has not started")
        return self._node

    async def start(self) -> str:
        """Loads the model, listens, and returns host:port.

        Raises:
            ValueError: the model, or its fit with the config, is wrong.
            StartError: the address cannot be listened on.
        """
        if (tls := self._config.access.tls) is not None:
            tls.check()
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        loaded = self._loaded
        if loaded is None:
            # Now, not when the weights have been read.
            check_memory(self._config, choose_device(self._config.device))
            loaded = await asyncio.to_thread(load_model, self._config, self._on_progress)
            self._loaded = loaded
        if loaded.device.type == "cpu" and not native.available():
            _log.warning(
                "the CPU kernels were not compiled for this machine: tokens take several times "
                "longer; install a C compiler and install legato again"
            )
        budget = await asyncio.to_thread(
            KvBudget.of, self._config, loaded, inherited_bytes=self._kv_bytes
        )
        self._kv_bytes = budget.num_bytes
        node = WorkerNode.build(
            self._config,
            loaded,
            budget,
            lifecycle=self._lifecycle,
            sample=self._sample,
            loop=asyncio.get_running_loop(),
            on_failure=self._on_engine_failure,
        )
        access = self._config.access
        server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[RefuseStrangers(access), RefuseMalformed()]
        )
        if self._config.otlp_endpoint is not None:
            self._tracing = Tracing(
                self._config.otlp_endpoint,
                service=f"legato-{self._config.role}",
                instance=node.identity.worker_id,
            )
        self._links = node.add_services(server, self._begin_drain, self._tracing)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            port = access.add_port(server, f"{host}:{self._config.port}")
        except RuntimeError as error:
            raise StartError(
                f"cannot listen on {host}:{self._config.port}: the port is taken or the address "
                f"is not this machine's ({error})"
            ) from None
        self._node, self._server = node, server
        node.engine.start()
        await server.start()
        self._lifecycle.move_to(Phase.READY)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        give_back_freed()
        give_back_code()
        compiles = loaded.device.type == "cuda"
        self._spawn(watch(node.engine, self._step_timeout_s, compiles=compiles))
        return f"{_reachable(host)}:{port}"

    async def drain(self, timeout_s: float) -> bool:
        """No new work; waits for the calls under way. True once none is left."""
        self._begin_drain()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        return await self._lifecycle.wait_idle(timeout_s)

    async def stop(self, grace_s: float) -> None:
        """Ends everything; calls that are not over after `grace_s` are cut off. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._begin_drain()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.stop(grace_s)
        assert self._links is not None, "there as long as the server is"
        await self._links.ended()
        self._lifecycle.move_to(Phase.DEAD)
        for task in self._tasks:
            task.cancel()
        await self.node.sender.close()
        self.node.tickets.close_all()
        if not await asyncio.to_thread(self.node.engine.stop, _ENGINE_STOP_TIMEOUT_S):
            _log.error("the engine did not end within %g s", _ENGINE_STOP_TIMEOUT_S)
        self.node.pager.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def successor(self, config: WorkerConfig) -> WorkerServer:
        """After `stop`: a worker of another role around the same weights, not started. It has an
        identity of its own, and listens where `config` says. No file is read, and the KV memory of
        this one is free before it takes its own.

        Raises:
            ValueError: `config` asks for other weights than are loaded.
            RuntimeError: this one's KV memory is not free.
        """
        assert self._server is None, "stopped first"
        if self._loaded is None or self._node is None:
            raise RuntimeError("the worker has not started")
        check_same_weights(self._config, config, self._loaded)
        cache, self._node, self._links = weakref.ref(self._node.cache), None, None
        await freed(cache)
        return WorkerServer(
            config,
            self._loaded,
            sample=self._sample,
            exit_process=self._exit_process,
            step_timeout_s=self._step_timeout_s,
            inherited_kv_bytes=self._kv_bytes,
        )

    def _begin_drain(self) -> None:
        if self._lifecycle.phase is Phase.READY:
            self._lifecycle.move_to(Phase.DRAINING)
            self._spawn(self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING))

    def _on_engine_failure(self, cause: BaseException) -> None:
        _log.critical("worker %s ends: %s: %s", self.worker_id, type(cause).__name__, cause)
        self._lifecycle.move_to(Phase.DEAD)
        self.node.tickets.close_all()
        self._spawn(self._die())

    async def _die(self) -> None:
        try:
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await asyncio.sleep(_LAST_WORDS_S)
            if self._server is not None:
                await self._server.stop(0)
        finally:
            self._exit_process()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in _SERVICES:
            await self._health.set(service, status)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # a task that nobody holds may be collected while it runs
        task.add_done_callback(self._tasks.discard)


def _reachable(host: str) -> str:
    """What others dial: a wildcard is where to listen, not where to go."""
    return socket.gethostname() if host in ("0.0.0.0", "[::]") else host
