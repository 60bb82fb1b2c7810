"""Outcome: how a request ended, told from what was raised."""

from __future__ import annotations

import asyncio
from typing import Literal

import grpc

from legato.cluster.errors import ClientGoneError, RequestError

Outcome = Literal["completed", "failed", "cancelled", "refused"]
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


def outcome_of(error: BaseException | None) -> Outcome:
    """Refused: the client's fault or a full house. Failed: ours."""
    if error is None:
        return "completed"
    if isinstance(error, asyncio.CancelledError | ClientGoneError):
        return "cancelled"
    if isinstance(error, RequestError):
        if error.code in _REFUSED:
            return "refused"
        if error.code is grpc.StatusCode.ABORTED:  # the client went on with a newer call
            return "cancelled"
    return "failed"
