"""Client, AsyncClient: a service seen from Python, blocking or with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato.cluster.roles import WIRE_ROLES
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from legato.protos import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from legato.cluster.control_plane import Role
    from legato.protos import common_pb2

CALL_TIMEOUT_S = 10.0  # of every call but Generate
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # as all of our commands do: a service is near
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what a silent peer is given: a minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),  # the reply to a prompt with many logprobs is large
)


def chat_request(
    user: str,
    *,
    system: str | None = None,
    sampling: common_pb2.SamplingParams | None = None,
    n: int | None = None,
) -> pb.GenerateRequest:
    """A chat of one turn, to be answered `n` times (once by default)."""
    messages = [pb.ChatMessage(role="user", content=user)]
    if system is not None:
        messages.insert(0, pb.ChatMessage(role="system", content=system))
    return pb.GenerateRequest(messages=pb.ChatMessages(messages=messages), sampling=sampling, n=n)


def scale_request(targets: Mapping[Role, int]) -> cluster_pb2.ScalePoolRequest:
    """Targets by name of the pool."""
    return cluster_pb2.ScalePoolRequest(
        targets=[
            cluster_pb2.PoolTarget(
                role=WIRE_ROLES[role],
                target=target,
            )
            for role, target in targets.items()
        ]
    )


def role_targets(response: cluster_pb2.ScalePoolResponse) -> dict[str, int]:
    """The reverse of `scale_request`."""
    names = {number: role for role, number in WIRE_ROLES.items()}
    return {names[item.role]: item.target for item in response.targets}


class Client:
    """Blocking. All methods raise grpc.RpcError with the status that the service answered."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; streams that still run are cancelled."""
        self._channel.close()

    def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateResponse]:
        """Deltas, then one finish, of each answer; `index` says which. Closing the iterator
        cancels the request.
        """
        call = self._generation.Generate(request, timeout=timeout_s)
        try:
            yield from call
        finally:
            call.cancel()

    def model(self) -> pb.GetModelResponse:
        """What is served, and its limits."""
        return self._generation.GetModel(pb.GetModelRequest(), timeout=CALL_TIMEOUT_S)

    def status(self) -> cluster_pb2.GetStatusResponse:
        """Pools, workers, queue."""
        return self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)

    def scale(self, targets: Mapping[Role, int]) -> dict[str, int]:
        """Sets the targets named; returns those of both pools."""
        request = scale_request(targets)
        return role_targets(self._cluster.ScalePool(request, timeout=CALL_TIMEOUT_S))

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Begins the orderly end of the service."""
        request = cluster_pb2.ShutdownRequest(drain_timeout_s=drain_timeout_s)
        self._cluster.Shutdown(request, timeout=CALL_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when requests are served.

        Raises:
            TimeoutError: not within `timeout_s`.
        """
        watch = self._health.Watch(
            health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
        )
        try:
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            if watch.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise TimeoutError(f"the service is not ready after {timeout_s:g} s") from error
        finally:
            watch.cancel()


class AsyncClient:
    """The same with asyncio. Methods raise grpc.aio.AioRpcError."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; streams that still run are cancelled."""
        await self._channel.close()

    async def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Deltas, then one finish, of each answer; `index` says which. `aclose()` on the iterator
        cancels the request.
        """
        call = self._generation.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def model(self) -> pb.GetModelResponse:
        """What is served, and its limits."""
        return await self._generation.GetModel(pb.GetModelRequest(), timeout=CALL_TIMEOUT_S)

    async def status(self) -> cluster_pb2.GetStatusResponse:
        """Pools, workers, queue."""
        return await self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)

    async def scale(self, targets: Mapping[Role, int]) -> dict[str, int]:
        """Sets the targets named; returns those of both pools."""
        request = scale_request(targets)
        return role_targets(await self._cluster.ScalePool(request, timeout=CALL_TIMEOUT_S))

    async def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Begins the orderly end of the service."""
        request = cluster_pb2.ShutdownRequest(drain_timeout_s=drain_timeout_s)
        await self._cluster.Shutdown(request, timeout=CALL_TIMEOUT_S)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when requests are served.

        Raises:
            TimeoutError: not within `timeout_s`.
        """
        watch = self._health.Watch(
            health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
        )
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise TimeoutError(f"the service is not ready after {timeout_s:g} s") from error
        finally:
            watch.cancel()
