"""running_service: a router in this process and worker processes with a real model, no Ray."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from legato.cluster.config import RouterOptions
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.role_change import UnknownWorkerError
from legato.cluster.router import Router
from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import grpc

    from legato.cluster.control_plane import Role
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad
    from legato.cluster.text.model_text import ModelText

START_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 60.0
_ROLES: tuple[Role, ...] = ("prefill", "decode")
_ROLE_NUMBERS = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "colocated": common_pb2.WORKER_ROLE_COLOCATED,
}


class _NoController:
    """The same workers for good: one that is lost fails the run."""

    def __init__(self) -> None:
        self.endpoints: list[WorkerEndpoint] = []

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """As they are."""
        return [
            cluster_pb2.PoolStatus(
                role=_ROLE_NUMBERS[role],
                workers=[
                    cluster_pb2.WorkerStatus(
                        worker_id=worker.worker_id,
                        role=_ROLE_NUMBERS[role],
                        address=worker.address,
                    )
                    for worker in self.endpoints
                    if worker.role == role
                ],
            )
            for role in dict.fromkeys(worker.role for worker in self.endpoints)
        ]

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """Changes nothing."""
        return targets

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """Nobody asks for it."""
        raise UnknownWorkerError("nothing here changes its role")

    async def drain_worker(self, worker_id: str) -> str:
        """Nobody asks for it."""
        raise UnknownWorkerError("nothing here is drained by hand")

    async def drain_node(self, node: str) -> list[str]:
        """Nobody asks for it."""
        raise UnknownWorkerError("nothing here is drained by hand")

    async def shutdown(self, drain_timeout_s: float) -> None:
        """Does nothing."""

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """Its requests fail, and say so."""

    async def report_load(self, load: RouterLoad) -> None:
        """Nobody reads it."""

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        """There is none."""
        return cluster_pb2.AutoscalerStatus()


@asynccontextmanager
async def running_service(
    model: str,
    text: ModelText,
    worker_arguments: Sequence[str],
    options: RouterOptions | None = None,
    roles: Sequence[Role] = _ROLES,
) -> AsyncIterator[str]:
    """Yields the router's address. `options`: the router's, at any free port by default. `roles`:
    of the workers, which all have the same arguments.

    Raises:
        RuntimeError: a worker did not start; it has said why on stderr.
    """
    processes: list[asyncio.subprocess.Process] = []
    control = _NoController()
    router = Router(
        options or RouterOptions(port=0),
        text,
        control,
        model_name=text.name,
        version="bench",
        owner_pid=os.getpid(),
        owner_host=socket.gethostname(),
    )
    try:
        for role in roles:
            # One by one: those that did start are ended where another does not.
            processes.append(await _start(model, role, worker_arguments))  # noqa: PERF401
        control.endpoints = [
            await _endpoint(role, process) for role, process in zip(roles, processes, strict=True)
        ]
        address = await router.start()
        try:
            await router.set_workers(control.endpoints)
            yield address
        finally:
            await router.stop()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def until_ready(channel: grpc.aio.Channel) -> None:
    """Until the router has heard of its workers.

    Raises:
        TimeoutError: it has not for READY_TIMEOUT_S.
    """
    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not (await stub.GetStatus(cluster_pb2.GetStatusRequest())).ready:  # noqa: ASYNC110  # the state is remote
            await asyncio.sleep(0.05)


async def _start(model: str, role: Role, arguments: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "legato.worker", "--model", model, "--role", role),
        *("--die-with-parent", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )


async def _endpoint(role: Role, process: asyncio.subprocess.Process) -> WorkerEndpoint:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
    if not line:
        raise RuntimeError(f"the {role} worker did not start: status {await process.wait()}")
    ready = json.loads(line)
    return WorkerEndpoint(ready["worker_id"], role, ready["address"])
