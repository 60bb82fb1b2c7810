"""AttemptEndedError and its kinds: how an attempt ends, told from the status of a worker's call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError
from legato.protos.kv_lapsed import KV_LAPSED
from legato.protos.never_retry import NEVER_RETRY
from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.worker_view import WorkerView


class AttemptEndedError(Exception):
    """The attempt cannot go on, the request can: on other workers or later."""

    def __init__(self, view: WorkerView, reason: str) -> None:
        super().__init__(f"{view.endpoint.role} worker {view.worker_id}: {reason}")
        self.view = view
        self.reason = reason


class NoRoomError(AttemptEndedError):
    """The worker has no room now: nothing is lost, the request waits again."""


class RefusedError(AttemptEndedError):
    """The worker does not take the request: it drains, or is too small."""


class KvGoneError(AttemptEndedError):
    """The prefill worker did not keep the KV of an attempt whose decode worker was lost."""


class KvLapsedError(AttemptEndedError):
    """The decode worker says that the KV stopped coming, and is well itself."""


class PathFailedError(AttemptEndedError):
    """KV did not get from a prefill to a decode worker while the router hears both: which of them
    is to blame, if any, cannot be told from one such failure.
    """

    def __init__(
        self, prefill: WorkerView, decode: WorkerView, reason: str, *, refused: bool
    ) -> None:
        """`refused`: the decode worker was reached, and its answer was no."""
        did = "refuses KV" if refused else "gets no KV"
        super().__init__(decode, f"{did} from prefill worker {prefill.worker_id}: {reason}")
        self.prefill = prefill
        self.refused = refused

    @property
    def path(self) -> tuple[str, str]:
        """As the policies name it."""
        return self.prefill.worker_id, self.view.worker_id


class WorkerFailedError(AttemptEndedError):
    """The worker is lost, or failed at this request."""

    def __init__(self, view: WorkerView, reason: str, *, gone: bool = False) -> None:
        """`gone`: it did not say so itself; it does not answer any more."""
        super().__init__(view, reason)
        self.gone = gone


class WorkerFaultError(Exception):
    """A worker broke the protocol, or says that the router did: a bug, never retried."""


_FAILED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
}


def meaning_of(
    view: WorkerView,
    code: grpc.StatusCode,
    details: str | None,
    trailers: Iterable[tuple[str, str | bytes]],
) -> Exception:
    """What the status with which a worker ended a call says of the attempt."""
    text, trailers = printable(details or ""), tuple(trailers)
    if NEVER_RETRY in trailers:
        broken = code is grpc.StatusCode.INTERNAL
        reason = Reason.BROKEN_LOGITS if broken else None
        return RequestError(code, text or code.name, reason=reason)
    if KV_LAPSED in trailers:
        return KvLapsedError(view, text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NoRoomError(view, text or code.name)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return RefusedError(view, text or code.name)
    if code in _FAILED:
        gone = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        return WorkerFailedError(view, f"{code.name} {text}", gone=gone)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(code, "the request's deadline passed while a worker served it")
    return WorkerFaultError(f"worker {view.worker_id} answered {code.name}: {text}")
