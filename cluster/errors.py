"""RequestError: why a request was not served, as a gRPC status and one clear sentence."""

from __future__ import annotations

import grpc

from legato.protos.printable import shown as shown  # with the errors it is used in

UNAVAILABLE_RETRY_MS = 1000  # about what a worker or a router needs to come back


class RequestError(Exception):
    """Carries the status code and the sentence that the client gets.

    `retry_after_ms`: when to try again. It goes out in the status details, see
    `legato.protos.retry_hint`, and as trailing metadata `retry-after-ms`. `is_final`: never, which
    goes out as `legato.protos.never_retry`.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        retry_after_ms: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class ClientGoneError(Exception):
    """Nobody is there any more to read the answer, or to be told so."""


def invalid(message: str) -> RequestError:
    """INVALID_ARGUMENT: `message` names field, value and limit."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


def unavailable(message: str) -> RequestError:
    """UNAVAILABLE: `message` names what is missing."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, message, retry_after_ms=UNAVAILABLE_RETRY_MS)


class ServiceError(Exception):
    """Why a service could not start or go on: one sentence for the person who typed the command."""
