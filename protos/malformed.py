"""RefuseMalformed: bytes that are no message of the method answer INVALID_ARGUMENT."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from legato.protos.status_details import details_trailer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Context = grpc.aio.ServicerContext[Any, Any]
    Parse = Callable[[bytes], Any]

MALFORMED = "MALFORMED_REQUEST"
MALFORMED_REMEDY = (
    "Send a message of the type that the method takes, as the protos have it; strings are UTF-8."
)
_MAKE_HANDLER = {  # by whether requests and responses are streams
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Parses requests itself: left to gRPC, one that is malformed (a string that is not UTF-8 is
    enough) answers UNKNOWN, and each writes a stack trace to the log.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401  # gRPC's handlers have no common type
        """Takes over the parsing of every method that is a coroutine, or answers a stream."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        serve = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        if inspect.isasyncgenfunction(serve) and handler.request_streaming:  # reflection's

            async def answer(stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
                async for response in serve(_ParsedStream(parse, stream, context), context):
                    yield response

            return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)
        if not inspect.iscoroutinefunction(serve):
            return handler

        async def serve_one(data: bytes, context: Context) -> Any:  # noqa: ANN401  # as above
            return await serve(await _parsed(parse, data, context), context)

        async def serve_stream(stream: AsyncIterator[bytes], context: Context) -> Any:  # noqa: ANN401  # as above
            return await serve(_ParsedStream(parse, stream, context), context)

        make = _MAKE_HANDLER[handler.request_streaming, handler.response_streaming]
        new = serve_stream if handler.request_streaming else serve_one
        return make(new, None, handler.response_serializer)


class _ParsedStream:
    """A stream's messages. A malformed one ends the call: AbortError, as of `context.abort`."""

    def __init__(self, parse: Parse, stream: AsyncIterator[bytes], context: Context) -> None:
        self._parse, self._stream, self._context = parse, stream, context

    def __aiter__(self) -> _ParsedStream:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # any message
        return await _parsed(self._parse, await anext(self._stream), self._context)


async def _parsed(parse: Parse, data: bytes, context: Context) -> Any:  # noqa: ANN401  # any message
    try:
        return parse(data)
    except DecodeError as error:
        message = f"the request of {len(data)} bytes is malformed: {error}"
        code = grpc.StatusCode.INVALID_ARGUMENT
        number: int = code.value[0]
        details = details_trailer(number, message, reason=MALFORMED, remedy=MALFORMED_REMEDY)
        await context.abort(code, message, (details,))
