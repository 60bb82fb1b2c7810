"""with_status: what a gRPC handler raises becomes one status and one sentence."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from legato.cluster.error_reasons import OF_FIELDS, violation_of
from legato.cluster.errors import RequestError
from legato.protos.never_retry import NEVER_RETRY
from legato.protos.status_details import details_trailer, sentence

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
Trailers = tuple[tuple[str, str | bytes], ...]
SERVER_TIME = "server-time-us"
log = logging.getLogger(__name__)


def with_status(
    handler: Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]],
) -> Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]]:
    """Wraps a handler. A RequestError is told as it stands, with its details; anything else is
    logged, and told as INTERNAL with the reference under which the log has it.
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
            trailers = trailers_of(error, time.monotonic() - began_s)
            await context.abort(error.code, sentence(error.message), trailers)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            reference = uuid.uuid4().hex[:12]
            log.exception("internal error, reference %s", reference)
            fault = RequestError(
                grpc.StatusCode.INTERNAL, f"internal error; the log has it as {reference}"
            )
            await context.abort(fault.code, fault.message, trailers_of(fault))
        raise AssertionError("abort always raises")

    return handle


def trailers_of(error: RequestError, seconds: float = 0.0) -> Trailers:
    """What goes out with the error's code and `sentence`, whoever ends the call with it: the
    details, and with a retry hint SERVER_TIME, from the handler's beginning to the error, without
    the way there and back.
    """
    retry_ms = None if error.is_final else error.retry_after_ms
    number: int = error.code.value[0]
    details = details_trailer(
        number,
        sentence(error.message),
        reason=error.reason.name,
        remedy=error.reason.remedy,
        violation=violation_of(error.message) if error.reason in OF_FIELDS else None,
        retry_after_s=None if retry_ms is None else retry_ms / 1000,
    )
    if error.is_final:
        return (NEVER_RETRY, details)
    if retry_ms is None:
        return (details,)
    return (
        ("retry-after-ms", str(retry_ms)),
        (SERVER_TIME, str(round(seconds * 1e6))),
        details,
    )
