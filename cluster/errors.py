"""RequestError: why a request was not served, as a gRPC status and one clear sentence."""

from __future__ import annotations

import grpc


class RequestError(Exception):
    """Carries the status code and the sentence that the client gets."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> RequestError:
    """INVALID_ARGUMENT: `message` names field, value and limit."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


class ServiceError(Exception):
    """Why a service could not start or go on: one sentence for the person who typed the command."""
