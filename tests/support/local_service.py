"""LocalService: a router in this process and real worker processes, without Ray."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from worker_process import WorkerProcess, worker_process

from legato.cluster.client_access import NOTHING_SHOWN, ClientAccess
from legato.cluster.config import RouterOptions
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.role_change import RoleChange, UnknownWorkerError
from legato.cluster.router import Router
from legato.cluster.text.model_text import ModelText
from legato.protos import (
    cluster_pb2,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from legato.protos import cluster_pb2_grpc as cluster_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from legato.cluster.control_plane import Role
    from legato.cluster.router_load import RouterLoad


NO_PROXY = (("grpc.enable_http_proxy", 0),)
ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "colocated": common_pb2.WORKER_ROLE_COLOCATED,
}


@dataclass
class LocalWorker:
    """One running worker process."""

    role: Role
    process: WorkerProcess
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def worker_id(self) -> str:
        return self.process.worker_id

    @property
    def address(self) -> str:
        return self.process.address

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.cleanup.close()


def start_worker(model: Path, role: Role, arguments: Sequence[str]) -> LocalWorker:
    """Blocks until it is ready; raises where it does not start."""
    with ExitStack() as stack:
        process = stack.enter_context(worker_process(model, role, *arguments))
        return LocalWorker(role, process, stack.pop_all())


class StaticControl:
    """A control plane without a controller: it remembers what the router reported."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, str]] = []
        self.workers: list[LocalWorker] = []

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        return [
            cluster_pb2.PoolStatus(
                role=number,
                workers=[
                    cluster_pb2.WorkerStatus(
                        worker_id=worker.worker_id, role=number, address=worker.address
                    )
                    for worker in self.workers
                    if worker.role == role
                ],
            )
            for role, number in ROLES.items()
        ]

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        return targets

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        raise UnknownWorkerError("nothing here changes its role")

    async def drain_worker(self, worker_id: str) -> str:
        raise UnknownWorkerError("nothing here is drained by hand")

    async def drain_node(self, node: str) -> list[str]:
        raise UnknownWorkerError("nothing here is drained by hand")

    async def shutdown(self, drain_timeout_s: float) -> None:
        return None

    async def report_lost(self, worker_id: str, reason: str) -> None:
        self.lost.append((worker_id, reason))

    async def report_load(self, load: RouterLoad) -> None:
        raise AssertionError("nothing is autoscaled here")

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        raise AssertionError("nothing is autoscaled here")


class LocalService:
    """`async with LocalService(model, …) as service:` is ready to be asked."""

    def __init__(
        self,
        model: str | Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        colocated: int = 0,
        worker_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        colocated_args: Sequence[str] = (),
        options: RouterOptions | None = None,
        client: ClientAccess = NOTHING_SHOWN,
    ) -> None:
        self.client = client
        self.model = Path(model)
        self.counts: dict[Role, int] = {
            "prefill": prefill,
            "decode": decode,
            "colocated": colocated,
        }
        self.args: dict[Role, list[str]] = {
            "prefill": [*worker_args, *prefill_args],
            "decode": [*worker_args, *decode_args],
            "colocated": [*worker_args, *colocated_args],
        }
        self.options = options or RouterOptions(port=0, local_prefill_tokens=0)
        self.control = StaticControl()
        self.workers: list[LocalWorker] = []

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()
        await self.router.stop()
        await self._close()

    async def _start(self) -> None:
        text = ModelText.load(self.model)
        starting = [
            asyncio.to_thread(start_worker, self.model, role, self.args[role])
            for role, count in self.counts.items()
            for _ in range(count)
        ]
        results = await asyncio.gather(*starting, return_exceptions=True)
        self.workers = [worker for worker in results if isinstance(worker, LocalWorker)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self.router = self._new_router(text)
        self.address = await self.router.start()
        await self.publish()
        self.channel = self.client.aio_channel(self.address, NO_PROXY)
        self.generation = generation_pb2_grpc.GenerationStub(self.channel)
        self.cluster = cluster_grpc.ClusterStub(self.channel)
        async with asyncio.timeout(30):
            while not (await self.status()).ready:  # noqa: ASYNC110  # the state is remote
                await asyncio.sleep(0.05)

    def _new_router(self, text: ModelText) -> Router:
        return Router(
            self.options,
            text,
            self.control,
            model_name=self.model.name,
            version="test",
            owner_pid=os.getpid(),
            owner_host=socket.gethostname(),
        )

    @asynccontextmanager
    async def another_router(self) -> AsyncIterator[tuple[Router, str]]:
        """A second one over the same workers, ready, and its address."""
        router = self._new_router(self.router.text)
        address = await router.start()
        try:
            await router.set_workers(self.endpoints())
            async with asyncio.timeout(30):
                while not router.ready:  # noqa: ASYNC110  # it tells nobody here
                    await asyncio.sleep(0.02)
            yield router, address
        finally:
            await router.stop()

    def endpoints(self) -> list[WorkerEndpoint]:
        """Of the workers that live."""
        return [
            WorkerEndpoint(worker.worker_id, worker.role, worker.address) for worker in self.workers
        ]

    async def _close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(worker.kill) for worker in self.workers))

    async def publish(self) -> None:
        """Tells the router which of the workers live."""
        self.control.workers = self.workers
        await self.router.set_workers(self.endpoints())

    async def status(self) -> cluster_pb2.GetStatusResponse:
        return await self.cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=5)

    async def loads(self) -> list[tuple[int, common_pb2.WorkerLoad]]:
        """(role, load) of every worker, asked of the workers themselves, as it is now."""
        return list(await asyncio.gather(*(self._load(worker) for worker in self.workers)))

    async def _load(self, worker: LocalWorker) -> tuple[int, common_pb2.WorkerLoad]:
        access = self.options.access
        async with access.channel(worker.address, NO_PROXY) as channel:
            watch = worker_pb2_grpc.WorkerControlStub(channel).WatchLoad(
                worker_pb2.WatchLoadRequest(), timeout=10, metadata=access.metadata
            )
            report = await watch.read()
            watch.cancel()
        return ROLES[worker.role], report.load

    async def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Until no worker holds anything; raises TimeoutError naming what is still held."""
        held: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    loads = await self.loads()
                    held = [
                        f"role {role}: {load}"
                        for role, load in loads
                        if load.free_blocks != load.total_blocks
                        or load.running
                        or load.waiting
                        or load.transferring
                    ]
                    if loads and not held:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"still held after {timeout_s} s: {held}") from None


class Answer:
    """A whole stream, checked while it is collected."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.deltas: list[str] = []
        self.logprobs: list[common_pb2.TokenLogprobs] = []
        self.finish: generation_pb2.Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def done(self) -> generation_pb2.Finish:
        assert self.finish is not None, "the stream ended without a finish"
        return self.finish

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        """Appends one message; asserts order and continuity."""
        assert self.finish is None, "a message after the finish"
        if response.WhichOneof("event") == "finish":
            self.finish = response.finish
            assert self.finish.usage.completion_tokens == len(self.token_ids)
            return
        assert response.delta.token_offset == len(self.token_ids), "a token was lost or doubled"
        self.token_ids.extend(response.delta.token_ids)
        self.deltas.append(response.delta.text)
        self.logprobs.extend(response.delta.logprobs)


async def collect(stream: AsyncIterator[generation_pb2.GenerateResponse]) -> Answer:
    """Reads a stream to its end."""
    answer = Answer()
    async for response in stream:
        answer.take(response)
    return answer


def request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    **sampling: object,
) -> generation_pb2.GenerateRequest:
    """A greedy request unless `sampling` says otherwise."""
    settings: dict[str, object] = {"temperature": 0.0, **sampling}
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        sampling=common_pb2.SamplingParams(**settings),  # type: ignore[arg-type]  # checked by protobuf
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message
