"""with_status: what a gRPC handler raises becomes one status and one sentence."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from legato.cluster.errors import RequestError
from legato.protos.never_retry import NEVER_RETRY
from legato.protos.retry_hint import hint_trailer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
Trailers = tuple[tuple[str, str | bytes], ...]
SERVER_TIME = "server-time-us"
log = logging.getLogger(__name__)


def with_status(
    handler: Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]],
) -> Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]]:
    """Wraps a handler. A RequestError is told as it stands, with its retry hint; anything else is
    logged and told as INTERNAL with the reference under which the log has it. With a hint comes
    SERVER_TIME: from the handler's beginning to the error, without the way there and back.
    """

    @functools.wraps(handler)
    async def handle(
        servicer: Any,  # noqa: ANN401  # any servicer
        request: Any,  # noqa: ANN401  # any message
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> T:
        began_s = time.monotonic()
        try:
            return await handler(servicer, request, context)
        except RequestError as error:
            trailers = _trailers(error, time.monotonic() - began_s)
            await context.abort(error.code, error.message, trailers)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            reference = uuid.uuid4().hex[:12]
            log.exception("internal error, reference %s", reference)
            await context.abort(
                grpc.StatusCode.INTERNAL, f"internal error; the log has it as {reference}"
            )
        raise AssertionError("abort always raises")

    return handle


def _trailers(error: RequestError, seconds: float) -> Trailers:
    if error.is_final:
        return (NEVER_RETRY,)
    retry_ms = error.retry_after_ms
    if retry_ms is None:
        return ()
    number: int = error.code.value[0]
    return (
        ("retry-after-ms", str(retry_ms)),
        (SERVER_TIME, str(round(seconds * 1e6))),
        hint_trailer(number, error.message, retry_ms / 1000),
    )
