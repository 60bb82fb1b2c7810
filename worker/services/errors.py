"""CallError: a gRPC status and one clear sentence, and the decorator that sends it."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, TypeVar

import grpc

from legato.protos.never_retry import NEVER_RETRY
from legato.worker.mailbox import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, NoReturn

    from legato.worker.mailbox import BrokenEvent

_log = logging.getLogger(__name__)
Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")


class CallError(Exception):
    """Ends a call with `code`; a trailer tells the router more than that does."""

    def __init__(
        self, code: grpc.StatusCode, message: str, *, trailer: tuple[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailers = () if trailer is None else (trailer,)


def invalid(message: str) -> CallError:
    """INVALID_ARGUMENT: `message` names field, value and limit."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, message)


def broken(event: BrokenEvent) -> CallError:
    """No other worker is to try: model and guide are the same everywhere. INVALID_ARGUMENT where
    it is the guide, else INTERNAL.
    """
    if event.guide_failure is not None:
        return wrong_guide(event.guide_failure)
    return CallError(
        grpc.StatusCode.INTERNAL,
        "the model gave no usable logits for this request: NaN or infinite values at output "
        f"position {event.index} (from 0)",
        trailer=NEVER_RETRY,
    )


def wrong_guide(reason: str) -> CallError:
    """INVALID_ARGUMENT, and no other worker is to try: the guide is the same everywhere."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, reason, trailer=NEVER_RETRY)


def wrong_role(rpc: str, role: str) -> CallError:
    """FAILED_PRECONDITION: the worker does not serve that RPC."""
    return CallError(grpc.StatusCode.FAILED_PRECONDITION, f"{rpc} is not served by a {role} worker")


def reports_errors(
    handler: Callable[
        [Service, Request, grpc.aio.ServicerContext[Any, Any]], Coroutine[Any, Any, Response]
    ],
) -> Callable[
    [Service, Request, grpc.aio.ServicerContext[Any, Any]], Coroutine[Any, Any, Response]
]:
    """Turns a handler's exceptions into statuses."""

    @functools.wraps(handler)
    async def reporting(
        self: Service, request: Request, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Response:
        trailers: tuple[tuple[str, str], ...] = ()
        try:
            return await handler(self, request, context)
        except CallError as error:
            code, message, trailers = error.code, error.message, error.trailers
        except EngineDiedError as error:
            # The worker, not the request, is at fault: another worker can serve it.
            code, message = grpc.StatusCode.UNAVAILABLE, str(error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.exception("%s failed", handler.__qualname__)
            code, message = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
        return await _abort(context, code, message, trailers)

    return reporting


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    message: str,
    trailers: tuple[tuple[str, str], ...],
) -> NoReturn:
    try:
        await context.abort(code, message, trailers)
    except grpc.aio.InternalError:
        # An answer is still under way that the client does not take: no status can come behind it.
        # So the call ends without one, as when a client is gone.
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")
