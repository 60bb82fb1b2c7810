"""Gateway: the public gRPC server: Generation, Cluster, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from legato.cluster.cluster_service import ClusterService
from legato.cluster.door import Door
from legato.cluster.error_status import with_status
from legato.cluster.errors import ClientGoneError, unavailable
from legato.cluster.known_fields import check_known_fields
from legato.cluster.open_files import PORT_SHARE, share_of_open_files
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc
from legato.protos.malformed import RefuseMalformed

if TYPE_CHECKING:
    from legato.cluster.router import Router

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
MAX_REQUEST_BYTES = 4 * 1024 * 1024  # exactly this passes; one byte more is RESOURCE_EXHAUSTED

SERVER_OPTIONS = (
    # A second service on the port must fail to start, not share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Calls that no handler has taken up yet. Above 1,000 of them gRPC would drop calls at random,
    # as CANCELLED; our own queue refuses with a reason.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    # Connections that never speak HTTP/2; two minutes by default.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Logprobs make answers large; there is no limit of ours on what we send.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 * 1024),
    # Clients may ping as often as they like, with and without calls.
    ("grpc.http2.min_ping_interval_without_data_ms", 0),
    ("grpc.http2.max_ping_strikes", 0),
    # A client that vanished without a word is noticed, and what it holds is freed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # This one decides how long a ping may stay unanswered; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Idle connections are told to go; clients connect again by themselves when they call.
    ("grpc.max_connection_idle_ms", 5 * 60 * 1000),
)


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Thin: converts and calls the router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @with_status
    # A coroutine that writes, not a generator: cancelling it runs its cleanup at once.
    async def Generate(  # type: ignore[override]  # noqa: N802  # as said; named by the proto
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.GenerateRequest, generation_pb2.GenerateResponse
        ],
    ) -> None:
        """See generation.proto."""

        async def send(response: generation_pb2.GenerateResponse) -> None:
            try:
                await context.write(response)
            except grpc.aio.InternalError as error:  # the call ended while a write waited
                raise ClientGoneError from error

        with contextlib.suppress(ClientGoneError):
            await self._router.generate(
                request, send, context.time_remaining(), headers=self._headers(context)
            )

    def _headers(self, context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str] | None:
        if self._router.tracing is None:  # nobody reads them
            return None
        return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}

    @with_status
    async def GetModel(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.GetModelResponse:
        """See generation.proto."""
        check_known_fields(request)
        router = self._router
        limits, references = router.pool.limits(), router.pool.references
        identity = references.get("decode", references.get("colocated"))
        if limits is None or identity is None:
            raise unavailable(f"no worker told its limits yet: {router.missing()}")
        return generation_pb2.GetModelResponse(
            name=router.model_name,
            architecture=identity.architecture,
            context_length=limits.context_length,
            vocab_size=limits.vocab_size,
            eos_token_ids=router.text.eos_token_ids,
            dtype=identity.dtype,
            fingerprint=identity.model_fingerprint,
            has_chat_template=router.text.has_chat_template,
            decode_kv_tokens=limits.decode_kv_tokens,
            prefill_kv_tokens=limits.prefill_kv_tokens,
            block_size=identity.kv_layout.block_size,
        )

    @with_status
    async def Tokenize(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.TokenizeResponse:
        """See generation.proto."""
        return await self._router.tokenize(request)

    @with_status
    async def Detokenize(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.DetokenizeResponse:
        """See generation.proto."""
        return await self._router.detokenize(request)


class Gateway:
    """Binds the services to a port, and shows in grpc.health.v1 whether requests are served."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._shown: bool | None = None
        self._wanted = False
        self._showing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Serves on host:port; returns the address bound.

        Raises:
            OSError: naming the address.
        """
        options = self._router.options
        interceptors: list[grpc.aio.ServerInterceptor] = [RefuseMalformed()]
        if self._router.credentials is not None:
            interceptors.insert(0, Door(self._router.credentials))
        # Those beyond are closed at once, so that files are left for all else.
        most = ("grpc.max_allowed_incoming_connections", share_of_open_files(PORT_SHARE))
        server = grpc.aio.server(options=(*SERVER_OPTIONS, most), interceptors=interceptors)
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationService(self._router), server
        )
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterService(self._router), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (GENERATION, CLUSTER, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        url_host = f"[{host}]" if ":" in host else host
        try:
            if options.tls is None:
                bound_port = server.add_insecure_port(f"{url_host}:{port}")
            else:
                credentials = options.tls.server_credentials()
                bound_port = server.add_secure_port(f"{url_host}:{port}", credentials)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {url_host}:{port}: the port is taken by another process "
                f"or the host is not an address of this machine"
            ) from error
        self._server = server
        await self._health.set(CLUSTER, health_pb2.HealthCheckResponse.SERVING)
        await self._show()
        await server.start()
        return f"{url_host}:{bound_port}"

    async def stop(self) -> None:
        """Closes the port; calls that still run are cancelled."""
        if self._showing is not None:
            await asyncio.wait({self._showing})
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    def show_health(self, *, ready: bool) -> None:
        """Shows "" and legato.v1.Generation as SERVING or not; returns at once."""
        self._wanted = ready
        if self._shown != ready and (self._showing is None or self._showing.done()):
            self._showing = asyncio.create_task(self._show())

    async def _show(self) -> None:
        while self._shown != self._wanted:
            self._shown = self._wanted
            response = health_pb2.HealthCheckResponse
            status = response.SERVING if self._wanted else response.NOT_SERVING
            for service in (health.OVERALL_HEALTH, GENERATION):
                await self._health.set(service, status)
