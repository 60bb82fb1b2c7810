"""RefuseMalformed: bytes that are no request of the method answer INVALID_ARGUMENT."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Parses requests itself: left to gRPC, one that is malformed (a string that is not UTF-8 is
    enough) answers UNKNOWN, and each writes a stack trace to the log.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401  # gRPC's handlers have no common type
        """Takes over the parsing of methods with one request; streams are left as they are."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse, serve = handler.request_deserializer, handler.unary_unary or handler.unary_stream
        if not inspect.iscoroutinefunction(serve):  # generators of other people's services
            return handler

        async def parse_and_serve(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401  # as above
            try:
                request = parse(data)
            except DecodeError as error:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"the request of {len(data)} bytes is malformed: {error}",
                )
            return await serve(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(parse_and_serve, None, handler.response_serializer)
