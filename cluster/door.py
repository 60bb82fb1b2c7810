"""Door: who may call the public services, and which of their calls, where there are tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.cluster.caller import CALLER
from legato.cluster.error_status import with_status
from legato.cluster.errors import RequestError
from legato.protos import cluster_pb2
from legato.protos.refuse_strangers import HEALTH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.cluster.caller import Caller
    from legato.cluster.credentials import Credentials

HEADER = "authorization"
_CLUSTER = f"/{cluster_pb2.DESCRIPTOR.services_by_name['Cluster'].full_name}/"
# Of the operators' calls, for tokens of clients: a new one is not, until it is named here.
_FOR_CLIENTS = (f"{_CLUSTER}GetStatus",)


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
                caller = self._credentials.check(values[0] if len(values) == 1 else None)
                _check_role(caller, handler_call_details.method)
                CALLER.set(caller)  # of this call's task
            except RequestError as error:
                # The wire is the same for all kinds of methods; this one reads nothing.
                return grpc.stream_stream_rpc_method_handler(_Refusal(error).refuse)
        return await continuation(handler_call_details)


def _check_role(caller: Caller, method: str) -> None:
    if caller.role == "admin" or not method.startswith(_CLUSTER) or method in _FOR_CLIENTS:
        return
    raise RequestError(
        grpc.StatusCode.PERMISSION_DENIED,
        f"{method.removeprefix(_CLUSTER)} is for tokens of the role admin; this one is of "
        f"{caller.tenant}, role {caller.role}",
    )


class _Refusal:
    def __init__(self, error: RequestError) -> None:
        self._error = error

    @with_status
    async def refuse(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: ANN401  # any message
        raise self._error
