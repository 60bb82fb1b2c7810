"""Client, Stream: a service seen from Python, blocking."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
from legato.cluster.client_events import collect
from legato.cluster.client_requests import make_request, tokenize_request
from legato.cluster.client_target import parse_addresses
from legato.cluster.retry_policy import RetryOptions, failure_of
from legato.cluster.rotation import Rotation
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from typing import Unpack

    from legato.cluster.client_access import ClientAccess
    from legato.cluster.client_attempts import Attempt
    from legato.cluster.client_events import Event, Result
    from legato.cluster.client_requests import Chat, Prompt, RequestSettings
    from legato.cluster.control_plane import Role

T = TypeVar("T")


class _Calls:
    """The calls of one stream, one after the other. Any thread may cancel the one that runs."""

    def __init__(self, attempts: Attempts, channels: Channels[grpc.Channel]) -> None:
        self.attempts = attempts
        self._channels = channels
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            if self._call is not None:
                self._call.cancel()

    def events(self) -> Generator[Event]:
        attempts = self.attempts
        while True:
            attempt = attempts.next()
            failure = CUT
            try:
                for response in self._open(attempt):
                    yield attempts.take(response)
            except grpc.RpcError as error:
                if not isinstance(error, grpc.Call):  # what `take` found is no end of a call
                    raise
                failure = failure_of(error)
            finally:
                self._end()
            if attempts.done:
                return
            self._check()
            if self._cancelled.wait(attempts.failed(failure)):
                self._check()

    def _open(self, attempt: Attempt) -> Iterator[generation_pb2.GenerateResponse]:
        self._check()
        stub = generation_pb2_grpc.GenerationStub(self._channels.of(attempt.target))
        call = stub.Generate(attempt.request, timeout=attempt.timeout_s)
        with self._lock:
            self._call = call
            if self._cancelled.is_set():
                call.cancel()
        return call

    def _end(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()
                self._call = None

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise self.attempts.cancelled("cancelled by its client")
        if self._channels.closed:
            raise self.attempts.cancelled("the client is closed")


class Stream:
    """An iterator of one request's events; one thread reads it, any may cancel it.

    Dropped before its end it is cancelled too.
    """

    def __init__(self, attempts: Attempts, channels: Channels[grpc.Channel]) -> None:
        self._calls = _Calls(attempts, channels)
        # It knows nothing of this object, so that both go with the last reference to this one.
        self._events = self._calls.events()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._events.close()

    @property
    def request_id(self) -> str:
        """As the service's logs have it."""
        return self._calls.attempts.request_id

    @property
    def num_attempts(self) -> int:
        """Calls so far: above 1 the stream was resumed, or refused for a while."""
        return self._calls.attempts.num_attempts

    @property
    def max_tokens(self) -> int | None:
        """Of each answer, as the service takes it: within context and pools. None at first."""
        return self._calls.attempts.state.max_tokens

    def cancel(self) -> None:
        """Frees what the request holds; whoever reads gets CANCELLED. Idempotent."""
        self._calls.cancel()

    def result(self) -> Result:
        """Reads to the end; to be asked before anything was read."""
        return collect(self.request_id, len(self._calls.attempts.state.answers), self)


class Client:
    """Blocking; may be used from several threads.

    `address` names one router of the service or several: host:port, with commas between them. All
    methods raise grpc.RpcError with the status that the service answered, `CallFailedError` where
    it was asked again in vain.
    """

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
        self._channels = Channels(lambda target: access.channel(target, CHANNEL_OPTIONS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections; streams that still run are cancelled."""
        for channel in self._channels.close():
            channel.close()

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Unpack[RequestSettings]
    ) -> Stream:
        """An answer as it comes, or n of them.

        `timeout_s` bounds it with all its tries (600 s by default). A broken stream goes on, on
        another router where there is one; nothing of it is lost or comes twice.

        Raises:
            TypeError, ValueError: from here, a request that cannot be; see `make_request`.
            CallFailedError: from the stream.
        """
        request = make_request(prompt, **settings)
        return Stream(Attempts(request, self._rotation, self._retry, timeout_s), self._channels)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Unpack[RequestSettings]
    ) -> Result:
        """As `stream`, collected."""
        with self.stream(prompt, timeout_s=timeout_s, **settings) as stream:
            return stream.result()

    def model(self) -> generation_pb2.GetModelResponse:
        """What is served, and its limits."""
        return self._ask(
            lambda channel: generation_pb2_grpc.GenerationStub(channel).GetModel(
                generation_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S
            )
        )

    def tokenize(
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
        return self._ask(
            lambda channel: generation_pb2_grpc.GenerationStub(channel).Tokenize(
                request, timeout=CALL_TIMEOUT_S
            )
        )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of all of them together, as that of an answer."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        return self._ask(
            lambda channel: generation_pb2_grpc.GenerationStub(channel).Detokenize(
                request, timeout=CALL_TIMEOUT_S
            )
        ).text

    def status(self) -> cluster_pb2.GetStatusResponse:
        """Pools, workers, queue."""
        return self._ask(
            lambda channel: cluster_pb2_grpc.ClusterStub(channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S
            )
        )

    def scale(self, targets: Mapping[Role, int]) -> dict[str, int]:
        """Sets the targets named; returns those of all pools."""
        return self._ask(
            lambda channel: role_targets(
                cluster_pb2_grpc.ClusterStub(channel).ScalePool(
                    scale_request(targets), timeout=CALL_TIMEOUT_S
                )
            )
        )

    def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Begins the orderly end of the service."""
        request = cluster_pb2.ShutdownRequest(drain_timeout_s=drain_timeout_s)
        self._ask(
            lambda channel: cluster_pb2_grpc.ClusterStub(channel).Shutdown(
                request, timeout=CALL_TIMEOUT_S
            )
        )

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when one of the routers serves requests.

        Raises:
            TimeoutError: none within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            target = self._rotation.pick()
            stub = health_pb2_grpc.HealthStub(self._channels.of(target))
            try:
                health = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=min(left_s, READY_CHECK_TIMEOUT_S)
                )
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                if error.code() not in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    raise
            time.sleep(min(READY_POLL_S, max(0.0, deadline_s - time.monotonic())))
        raise TimeoutError(f"the service is not ready after {timeout_s:g} s")

    def _ask(self, call: Callable[[grpc.Channel], T]) -> T:
        """Of each router in turn, until one is there."""
        tried: set[str] = set()
        while True:
            target = self._rotation.pick(tried)
            tried.add(target)
            try:
                return call(self._channels.of(target))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self._rotation.failed(target)
                if tried.issuperset(self._rotation.targets):
                    raise
