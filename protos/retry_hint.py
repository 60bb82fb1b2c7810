"""The retry hint of an error: google.rpc.RetryInfo in the details of its gRPC status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

DETAILS_KEY = "grpc-status-details-bin"
MAX_DETAILS = 16  # of a peer's status, that are looked into


def hint_trailer(code: int, message: str, retry_after_s: float) -> tuple[str, bytes]:
    """The trailer that says so, for an error with this status code (its number) and message."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMicroseconds(round(retry_after_s * 1e6))
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(info)
    return DETAILS_KEY, status.SerializeToString()


def retry_after_s(trailers: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Seconds, at least 0; None where the trailers have no hint that can be read."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _read(value)
    return None


def _read(value: bytes) -> float | None:
    info = error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(value).details[:MAX_DETAILS]:
            if detail.Unpack(info):
                seconds: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                return max(0.0, seconds)
    except DecodeError:  # a peer's bytes: no reason to lose the error itself
        return None
    return None
