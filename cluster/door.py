"""Door: who may call the public services: those that show a token, where there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.cluster.error_status import with_status
from legato.cluster.errors import RequestError
from legato.protos.refuse_strangers import HEALTH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.cluster.credentials import Credentials

HEADER = "authorization"


class Door(grpc.aio.ServerInterceptor):
    """Comes first: a call without a token ends before any message of it is read, whatever it is
    of. Health alone is open.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401  # gRPC's handlers have no common type
        """See the class."""
        if not handler_call_details.method.startswith(HEALTH):
            values = [
                value
                for key, value in handler_call_details.invocation_metadata or ()
                if key == HEADER and isinstance(value, str)
            ]
            try:
                self._credentials.check(values[0] if len(values) == 1 else None)
            except RequestError as error:
                # The wire is the same for all kinds of methods; this one reads nothing.
                return grpc.stream_stream_rpc_method_handler(_Refusal(error).refuse)
        return await continuation(handler_call_details)


class _Refusal:
    def __init__(self, error: RequestError) -> None:
        self._error = error

    @with_status
    async def refuse(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: ANN401  # any message
        raise self._error
