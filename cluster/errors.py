"""RequestError: why a request was not served, as a gRPC status and one clear sentence."""

from __future__ import annotations

import grpc

from legato.cluster.error_reasons import Reason
from legato.protos.printable import shown as shown  # with the errors it is used in

UNAVAILABLE_RETRY_MS = 1000  # about what a worker or a router needs to come back


class RequestError(Exception):
    """Carries the status code and the sentence that the client gets.

    `retry_after_ms`: when to try again. It goes out in the status details, see
    `legato.protos.status_details`, and as trailing metadata `retry-after-ms`. `is_final`: never,
    which goes out as `legato.protos.never_retry`. `reason`: for programs, and with a remedy; where
    it is not told, that which the code has where nothing more is said.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        retry_after_ms: int | None = None,
        is_final: bool = False,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message)
        assert reason is None or reason.code is code, f"{reason} is no reason for {code}"
        self.reason = reason or Reason.of(code)
        self.is_final = is_final
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class ClientGoneError(Exception):
    """Nobody is there any more to read the answer, or to be told so."""


def invalid(message: str, reason: Reason = Reason.INVALID_FIELD) -> RequestError:
    """INVALID_ARGUMENT: `message` names field, value and limit."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, reason=reason)


def unavailable(message: str, reason: Reason = Reason.NOT_SERVED_NOW) -> RequestError:
    """UNAVAILABLE: `message` names what is missing."""
    return RequestError(
        grpc.StatusCode.UNAVAILABLE, message, retry_after_ms=UNAVAILABLE_RETRY_MS, reason=reason
    )


class ServiceError(Exception):
    """Why a service could not start or go on: one sentence for the person who typed the command."""


class WrongInputError(ServiceError):
    """What that person gave is wrong: an option's value, a variable, a file or a line of one."""
