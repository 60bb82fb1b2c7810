"""RefuseStrangers: a worker's services are for the routers and workers of its service alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import kv_transfer_pb2
from legato.protos.internal_access import ROUTER_NAME, WORKER_NAME, names_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.protos.internal_access import InternalAccess

HEALTH = "/grpc.health.v1.Health/"
_KV = "/{}/".format(kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name)


class RefuseStrangers(grpc.aio.ServerInterceptor):
    """Comes first. A call without the secret, or by a certificate that is no router's (of KV: no
    worker's), ends before any message of it is read. Health is open.
    """

    def __init__(self, access: InternalAccess) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401  # gRPC's handlers have no common type
        """See the class."""
        method = handler_call_details.method
        if method.startswith(HEALTH):
            return await continuation(handler_call_details)
        if not self._access.knows_secret(handler_call_details.invocation_metadata):
            return refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                "this is an internal service: only routers and workers of its own service have "
                "the secret that it asks for",
            )
        handler = await continuation(handler_call_details)
        if handler is None or self._access.tls is None:
            return handler
        return _for_name(handler, WORKER_NAME if method.startswith(_KV) else ROUTER_NAME)


def refusal(code: grpc.StatusCode, message: str) -> Any:  # noqa: ANN401  # as above
    """A handler of any method that ends the call at once."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: ANN401  # any message
        await context.abort(code, message)

    # The wire is the same for all four kinds; this one reads nothing.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _for_name(handler: Any, name: str) -> Any:  # noqa: ANN401  # as above
    """The same handler, for who has `name` in his certificate. All of ours are coroutines."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
    serve = getattr(handler, kind)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401  # any message
        if name not in names_of(context.auth_context()):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"this is an internal service: the certificate must have the name {name}",
            )
        return await serve(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(guarded, handler.request_deserializer, handler.response_serializer)
