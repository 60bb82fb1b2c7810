"""with_status: what a gRPC handler raises becomes one status and one sentence."""

from __future__ import annotations

import functools
import logging
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
log = logging.getLogger(__name__)


def with_status(
    handler: Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]],
) -> Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[T]]:
    """Wraps a handler. A RequestError is told as it stands, with its retry hint; anything else is
    logged and told as INTERNAL with the reference under which the log has it.
    """

    @functools.wraps(handler)
    async def handle(
        servicer: Any,  # noqa: ANN401  # any servicer
        request: Any,  # noqa: ANN401  # any message
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> T:
        try:
            return await handler(servicer, request, context)
        except RequestError as error:
            retry_ms = error.retry_after_ms
            metadata = () if retry_ms is None else (("retry-after-ms", str(retry_ms)),)
            await context.abort(error.code, error.message, metadata)
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
