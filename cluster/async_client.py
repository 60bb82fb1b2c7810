"""AsyncClient, AsyncStream: a service seen from Python, with asyncio."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato.cluster.cancellation import check_cancellation
from legato.cluster.client_access import choose_access
from legato.cluster.client_attempts import CUT, Attempts
from legato.cluster.client_calls import (
    CALL_TIMEOUT_S,
    READY_CHECK_TIMEOUT_S,
    READY_POLL_S,
    role_targets,
    scale_request,
)
from legato.cluster.client_channels import CHANNEL_OPTIONS, Channels
from legato.cluster.client_events import empty_result
from legato.cluster.client_requests import make_request, tokenize_request
from legato.cluster.client_target import parse_addresses
from legato.cluster.retry_policy import RetryOptions, failure_of
from legato.cluster.rotation import Rotation
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from typing import Unpack

    from legato.cluster.client_access import ClientAccess
    from legato.cluster.client_attempts import Attempt
    from legato.cluster.client_events import Event, Result
    from legato.cluster.client_requests import Chat, Prompt, RequestSettings
    from legato.cluster.control_plane import Role

    Call = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]

T = TypeVar("T")


class _Calls:
    """The calls of one stream, one after the other."""

    def __init__(self, attempts: Attempts, channels: Channels[grpc.aio.Channel]) -> None:
        self.attempts = attempts
        self._channels = channels
        self._cancelled = asyncio.Event()
        self._call: Call | None = None

    def cancel(self) -> None:
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def events(self) -> AsyncGenerator[Event]:
        attempts = self.attempts
        while True:
            attempt = attempts.next()
            failure = CUT
            call = self._open(attempt)
            try:
                async for response in call:
                    yield attempts.take(response)
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error)
            except asyncio.CancelledError:
                check_cancellation()  # else only the call was cancelled: by `cancel` or `close`
            finally:
                call.cancel()
                self._call = None
            if attempts.done:
                return
            check_cancellation()
            self._check()
            delay_s = attempts.failed(failure)
            try:
                await asyncio.wait_for(self._cancelled.wait(), delay_s)
            except TimeoutError:
                continue
            self._check()

    def _open(self, attempt: Attempt) -> Call:
        self._check()
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(
            self._channels.of(attempt.target)
        )
        self._call = stub.Generate(attempt.request, timeout=attempt.timeout_s)
        return self._call

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise self.attempts.cancelled("cancelled by its client")
        if self._channels.closed:
            raise self.attempts.cancelled("the client is closed")


class AsyncStream:
    """An asynchronous iterator of one request's events. Cancelling who reads it cancels it.

    Dropped before its end it is cancelled too.
    """

    def __init__(self, attempts: Attempts, channels: Channels[grpc.aio.Channel]) -> None:
        self._calls = _Calls(attempts, channels)
        # It knows nothing of this object, so that both go with the last reference to this one.
        self._events = self._calls.events()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def request_id(self) -> str:
        """As the service's logs have it."""
        return self._calls.attempts.request_id

    @property
    def num_attempts(self) -> int:
        """Calls so far: above 1 the stream was resumed, or refused for a while."""
        return self._calls.attempts.num_attempts

    def cancel(self) -> None:
        """Frees what the request holds; whoever reads gets CANCELLED. Idempotent."""
        self._calls.cancel()

    async def aclose(self) -> None:
        """By who reads: nothing more comes. Idempotent."""
        self.cancel()
        await self._events.aclose()

    async def result(self) -> Result:
        """Reads to the end; to be asked before anything was read."""
        result = empty_result(self.request_id, len(self._calls.attempts.state.answers))
        async for event in self:
            result.add(event)
        return result


class AsyncClient:
    """`legato.cluster.client.Client` with asyncio, for one event loop."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        retry: RetryOptions | None = None,
        token: str | None = None,
        access: ClientAccess | None = None,
    ) -> None:
        """Connects when first asked. `access` is by default `ClientAccess.from_environment()`;
        `token` goes before its token.

        Raises:
            ValueError: an address that is no host:port, a TLS file that cannot be read, a token
                that would go to another machine in plain.
        """
        targets = parse_addresses(address)
        access = choose_access(access, token, targets)
        self._rotation = Rotation(targets)
        self._retry = retry or RetryOptions()
        self._channels = Channels(lambda target: access.aio_channel(target, CHANNEL_OPTIONS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections; streams that still run are cancelled."""
        for channel in self._channels.close():
            await channel.close()

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Unpack[RequestSettings]
    ) -> AsyncStream:
        """An answer as it comes, or n of them.

        `timeout_s` bounds it with all its tries (600 s by default). A broken stream goes on, on
        another router where there is one; nothing of it is lost or comes twice.

        Raises:
            TypeError, ValueError: from here, a request that cannot be; see `make_request`.
            CallFailedError: from the stream.
        """
        request = make_request(prompt, **settings)
        attempts = Attempts(request, self._rotation, self._retry, timeout_s)
        return AsyncStream(attempts, self._channels)

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Unpack[RequestSettings]
    ) -> Result:
        """As `stream`, collected."""
        async with self.stream(prompt, timeout_s=timeout_s, **settings) as stream:
            return await stream.result()

    async def model(self) -> generation_pb2.GetModelResponse:
        """What is served, and its limits."""
        return await self._ask(
            lambda channel: _generation(channel).GetModel(
                generation_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S
            )
        )

    async def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_bos: bool | None = None,
        parse_special_tokens: bool = False,
    ) -> generation_pb2.TokenizeResponse:
        """The ids of `prompt` as a request would have them, and the text of each. `add_bos` False
        leaves out what the model begins with; of text alone.

        Raises:
            TypeError: it is neither text nor a chat.
        """
        request = tokenize_request(
            prompt, add_bos=add_bos, parse_special_tokens=parse_special_tokens
        )
        return await self._ask(
            lambda channel: _generation(channel).Tokenize(request, timeout=CALL_TIMEOUT_S)
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of all of them together, as that of an answer."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        response = await self._ask(
            lambda channel: _generation(channel).Detokenize(request, timeout=CALL_TIMEOUT_S)
        )
        return response.text

    async def status(self) -> cluster_pb2.GetStatusResponse:
        """Pools, workers, queue."""
        return await self._ask(
            lambda channel: _cluster(channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S
            )
        )

    async def scale(self, targets: Mapping[Role, int]) -> dict[str, int]:
        """Sets the targets named; returns those of all pools."""
        request = scale_request(targets)
        return role_targets(
            await self._ask(
                lambda channel: _cluster(channel).ScalePool(request, timeout=CALL_TIMEOUT_S)
            )
        )

    async def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Begins the orderly end of the service."""
        request = cluster_pb2.ShutdownRequest(drain_timeout_s=drain_timeout_s)
        await self._ask(lambda channel: _cluster(channel).Shutdown(request, timeout=CALL_TIMEOUT_S))

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when one of the routers serves requests.

        Raises:
            TimeoutError: none within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            stub = health_pb2_grpc.HealthStub(self._channels.of(self._rotation.pick()))
            try:
                health = await stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=min(left_s, READY_CHECK_TIMEOUT_S)
                )
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    raise
            await asyncio.sleep(min(READY_POLL_S, max(0.0, deadline_s - time.monotonic())))
        raise TimeoutError(f"the service is not ready after {timeout_s:g} s")

    async def _ask(self, call: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        """Of each router in turn, until one is there."""
        tried: set[str] = set()
        while True:
            target = self._rotation.pick(tried)
            tried.add(target)
            try:
                return await call(self._channels.of(target))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self._rotation.failed(target)
                if tried.issuperset(self._rotation.targets):
                    raise


def _cluster(channel: grpc.aio.Channel) -> cluster_pb2_grpc.ClusterAsyncStub:
    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
    return stub


def _generation(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationAsyncStub:
    stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
    return stub
