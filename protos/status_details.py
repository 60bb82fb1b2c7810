"""google.rpc details of an error: what went wrong, in which field, what to do, when to retry."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "legato"
LOCALE = "en"
MAX_DETAILS = 16  # of a peer's status, that are looked into
MAX_VALUE_CHARS = 120  # of what is repeated from the sentence
# Bytes of a sentence as HTTP/2 carries it. It goes out twice, and clients take 8 KiB of trailers.
MAX_SENTENCE_BYTES = 2000


@dataclass(frozen=True)
class Violation:
    """What is wrong with one field; `limit` may be empty where the sentence has none."""

    field: str
    value: str
    limit: str


@dataclass(frozen=True)
class ErrorDetails:
    """As a client reads them; empty where the server has sent none."""

    reason: str = ""
    remedy: str = ""
    violation: Violation | None = None
    retry_after_s: float | None = None


def sentence(text: str) -> str:
    """Cut where it is too long for trailers."""
    if len(text) * 12 <= MAX_SENTENCE_BYTES:  # four bytes of UTF-8, each as %xx
        return text
    size = 0
    for place, char in enumerate(text):
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if size > MAX_SENTENCE_BYTES:
            return f"{text[:place]}…"
    return text


def details_trailer(
    code: int,
    message: str,
    *,
    reason: str,
    remedy: str,
    violation: Violation | None = None,
    retry_after_s: float | None = None,
) -> tuple[str, bytes]:
    """The trailer of an error with this status code (its number) and message."""
    # Messages that stand one behind the other are one message: most of it is made once, for a
    # service that is flooded refuses thousands a second.
    value: bytes = status_pb2.Status(code=code, message=message).SerializeToString()
    if retry_after_s is not None:
        value += _retry(round(retry_after_s * 1e6))
    if violation is None:
        return DETAILS_KEY, value + _constant(reason, remedy)
    return DETAILS_KEY, value + _of_field(reason, remedy, violation, message)


@functools.lru_cache(maxsize=1024)
def _retry(delay_us: int) -> bytes:
    status, retry = status_pb2.Status(), error_details_pb2.RetryInfo()
    retry.retry_delay.FromMicroseconds(delay_us)
    status.details.add().Pack(retry)
    return bytes(status.SerializeToString())


@functools.cache
def _constant(reason: str, remedy: str) -> bytes:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    status.details.add().Pack(_localized(remedy))
    return bytes(status.SerializeToString())


def _of_field(reason: str, remedy: str, violation: Violation, message: str) -> bytes:
    status = status_pb2.Status()
    named = {"field": violation.field, "value": violation.value, "limit": violation.limit}
    info = error_details_pb2.ErrorInfo(
        reason=reason,
        domain=DOMAIN,
        metadata={name: text[:MAX_VALUE_CHARS] for name, text in named.items() if text},
    )
    status.details.add().Pack(info)
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(
        field=violation.field[:MAX_VALUE_CHARS], description=message[: 2 * MAX_VALUE_CHARS]
    )
    status.details.add().Pack(bad)
    status.details.add().Pack(_localized(remedy))
    return bytes(status.SerializeToString())


def _localized(remedy: str) -> error_details_pb2.LocalizedMessage:
    return error_details_pb2.LocalizedMessage(locale=LOCALE, message=remedy)


def read_details(trailers: Iterable[tuple[str, str | bytes]]) -> ErrorDetails:
    """Of a peer's error, as far as they can be read."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return _read(value)
            except DecodeError:  # a peer's bytes: no reason to lose the error itself
                break
    return ErrorDetails()


def _read(value: bytes) -> ErrorDetails:
    reason = remedy = ""
    violation: Violation | None = None
    retry_after_s: float | None = None
    info, text = error_details_pb2.ErrorInfo(), error_details_pb2.LocalizedMessage()
    retry = error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(value).details[:MAX_DETAILS]:
        if detail.Unpack(info):
            reason = info.reason
            if "field" in info.metadata:
                named = (info.metadata.get(name, "") for name in ("field", "value", "limit"))
                violation = Violation(*named)
        elif detail.Unpack(text):
            remedy = text.message
        elif detail.Unpack(retry):
            delay = retry.retry_delay
            retry_after_s = max(0.0, delay.seconds + delay.nanos / 1e9)
    return ErrorDetails(reason, remedy, violation, retry_after_s)
