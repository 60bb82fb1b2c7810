"""read_object: the JSON object that a client posts, within bounds of size, time and depth."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import re2
from pydantic_core import from_json

from legato.cluster.errors import RequestError, invalid, shown
from legato.cluster.gateway import MAX_REQUEST_BYTES
from legato.cluster.http.error_response import BODY_TOO_LARGE, WRONG_MEDIA_TYPE, HttpError

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
_STRING = re2.compile(rb'"(?:[^"\\]|\\.)*"', _bytes_options())


async def read_object(request: Request) -> dict[str, Any]:
    """Reads the whole body. One that is too large is refused when that is known: by its length
    where the client tells it.

    Raises:
        RequestError: it is too large, too slow, or no JSON object.
    """
    kind = request.headers.get("content-type", "")
    # Pages of other origins may send anything else without asking first.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(
            WRONG_MEDIA_TYPE, f"content-type is {shown(kind)}, limit 'application/json'"
        )
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
    _check_containers(body)
    try:
        # jiter: it ends at 200 levels, and takes neither NaN nor half a surrogate pair.
        value = from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the request's body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"the request's body is {shown(value)}, limit a JSON object")
    return value


def _check_containers(body: bytearray) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    bare = _STRING.sub(b"", bytes(body))  # texts may have as many brackets as they like
    count = bare.count(b"[") + bare.count(b"{")
    if count > MAX_CONTAINERS:
        raise invalid(f"the request's body has {count} lists and objects, limit {MAX_CONTAINERS}")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_REQUEST_BYTES:
        raise HttpError(
            BODY_TOO_LARGE,
            f"the request's body has {num_bytes} bytes or more, limit {MAX_REQUEST_BYTES}",
        )
