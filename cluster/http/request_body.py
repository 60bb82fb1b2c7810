"""What a client posts: its body, and the JSON object that it is, in bounds of size, time, depth."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import grpc
import re2
from starlette.requests import ClientDisconnect

from legato.cluster.errors import ClientGoneError, RequestError, invalid, shown
from legato.cluster.gateway import MAX_REQUEST_BYTES
from legato.cluster.http.error_response import BODY_TOO_LARGE, WRONG_MEDIA_TYPE, HttpError
from legato.cluster.strict_json import parse_json

if TYPE_CHECKING:
    from starlette.requests import Request


def _bytes_options() -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.dot_nl = True
    return options


READ_TIMEOUT_S = 30.0  # for a body that comes in drops
# Lists and objects: each costs memory, and the collector's time, long before it is looked at.
MAX_CONTAINERS = 20_000
# Of all objects. The parser takes a microsecond for each, and lets nobody else run meanwhile.
MAX_MEMBERS = 60_000
_WHAT = "the request's body"
_CHARSET = re.compile(r"charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_STRING = re2.compile(rb'"(?:[^"\\]|\\.)*"', _bytes_options())


async def read_body(request: Request) -> bytes:
    """The whole body. One that is too large is refused when that is known: by its length where the
    client tells it.

    Raises:
        RequestError: it is too large, too slow, or not said to be JSON.
        ClientGoneError: the client left before its end.
    """
    _check_kind(request)
    length = request.headers.get("content-length", "")
    if length.isdigit():
        _check_size(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.stream():
                body += part
                _check_size(len(body))
    except TimeoutError:
        raise RequestError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the request's body did not come within {READ_TIMEOUT_S:g} s",
        ) from None
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(body)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Takes tenths of a second where it is of many small parts.

    Raises:
        RequestError: it is none.
    """
    _check_containers(body)
    try:
        value = parse_json(body, _WHAT)
    except ValueError as error:
        raise invalid(str(error)) from error
    if not isinstance(value, dict):
        told = "null" if value is None else shown(value)
        raise invalid(f"{_WHAT} is {told}, limit a JSON object")
    return value


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "")
    media_type, _, rest = kind.partition(";")
    # Pages of other origins may send anything else without asking first.
    if media_type.strip().lower() != "application/json":
        raise HttpError(
            WRONG_MEDIA_TYPE, f"content-type is {shown(kind)}, limit 'application/json'"
        )
    charset = _CHARSET.search(rest)
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise HttpError(WRONG_MEDIA_TYPE, f"content-type is {shown(kind)}, limit charset utf-8")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise HttpError(
            WRONG_MEDIA_TYPE, f"content-encoding is {shown(encoding)}, limit 'identity'"
        )


def _check_containers(body: bytes) -> None:
    """Texts may have as many brackets and colons as they like."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        bare = _STRING.sub(b"", body)
        count = bare.count(b"[") + bare.count(b"{")
        if count > MAX_CONTAINERS:
            raise invalid(f"{_WHAT} has {count} lists and objects, limit {MAX_CONTAINERS}")
    if body.count(b":") > MAX_MEMBERS:
        count = _STRING.sub(b"", body).count(b":")
        if count > MAX_MEMBERS:
            raise invalid(f"{_WHAT} has {count} members of objects, limit {MAX_MEMBERS}")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_REQUEST_BYTES:
        raise HttpError(
            BODY_TOO_LARGE,
            f"the request's body has {num_bytes} bytes or more, limit {MAX_REQUEST_BYTES}",
        )
