"""legato_service: `legato serve` as a user runs it, asked over gRPC."""

from __future__ import annotations

import re
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from legato.bench.peers.interference.contender import COLOCATED
from legato.bench.peers.interference.pinning import pinned
from legato.bench.peers.peer_process import PeerError
from legato.bench.peers.server_process import ServerProcess
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.protos import (
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from pathlib import Path

_REQUEST_TIMEOUT_S = 86_400.0  # a service refuses what it cannot end by then
_STATUS_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 60.0


def serve_command(peer: str, model: Path, num_threads: int, more: Sequence[str]) -> list[str]:
    """A pair divides the threads evenly; a colocated worker has them all."""
    pair = peer != COLOCATED
    sizes = ("1", "1", "0") if pair else ("0", "0", "1")
    threads = max(1, num_threads // 2) if pair else num_threads
    return [
        sys.executable, "-m", "legato.cluster.cli.main", "serve", "--port", "0",
        "--model", str(model), "--dtype", "bfloat16", "--device", "cpu", "--no-http",
        "--prefill", sizes[0], "--decode", sizes[1], "--colocated", sizes[2],
        "--threads", str(threads), *more,
    ]  # fmt: skip


class LegatoClient:
    """Streams of one service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(
            channel
        )

    async def send(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        """How many tokens each message brought.

        Raises:
            ValueError: the service refuses or fails.
        """
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
        )
        call = self._stub.Generate(request, timeout=_REQUEST_TIMEOUT_S)
        try:
            async for response in call:
                if response.WhichOneof("event") != "finish":
                    yield len(response.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{error.code().name}: {error.details()}") from None
        finally:
            call.cancel()


async def decode_process_ids(channel: grpc.aio.Channel) -> list[int]:
    """Of the service's decode workers.

    Raises:
        PeerError: it does not say.
    """
    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
    try:
        status = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise PeerError(f"no status: {error.code().name}: {error.details()}") from None
    return [
        worker.pid
        for pool in status.pools
        if pool.role == common_pb2.WORKER_ROLE_DECODE
        for worker in pool.workers
    ]


@asynccontextmanager
async def running_legato(
    command: Sequence[str], start_timeout_s: float, *, pin_decode: bool
) -> AsyncIterator[tuple[ServerProcess, LegatoClient]]:
    """Until it is ready, and ended afterwards. `pin_decode`: see `pinned`.

    Raises:
        PeerError: it does not become ready.
    """
    async with ServerProcess(command, end_timeout_s=_END_TIMEOUT_S) as process:

        async def ready() -> bool:
            return _address(process.output()) is not None

        await process.until(ready, start_timeout_s)
        address = _address(process.output())
        if address is None:
            raise PeerError("its output is gone")
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            if not pin_decode:
                yield process, LegatoClient(channel)
                return
            with pinned(await decode_process_ids(channel), process.process_ids()):
                yield process, LegatoClient(channel)


def _address(output: str) -> str | None:
    found = re.search(r"ready at (\S+)", output)
    return found[1] if found else None
