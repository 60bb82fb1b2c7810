"""server_events: one HTTP request, and the server-sent events of its answer as they come."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_CONNECT_TIMEOUT_S = 5.0
_HEADERS_TIMEOUT_S = 120.0  # some answer when the prompt has been computed
_READ_TIMEOUT_S = 120.0
_LINE_LIMIT_BYTES = 1 << 20
_DONE = "[DONE]"


async def server_events(
    host: str, port: int, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Posts `body`; yields each event's JSON. Leaving early closes the connection, which is how a
    client cancels.

    Raises:
        ValueError: the server refuses, or what it sends is no stream of such events.
        OSError: there is no connection, or it broke.
        TimeoutError: nothing came for long.
    """
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT_BYTES)
    try:
        text = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + text)
        await writer.drain()
        async with asyncio.timeout(_HEADERS_TIMEOUT_S):
            status, headers = await _head(reader)
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        async with aclosing(_pieces(reader, chunked=chunked)) as pieces:
            if status != 200:
                raise ValueError(f"HTTP {status}: {await _beginning(pieces)}")
            async with aclosing(_events(pieces)) as events:
                async for event in events:
                    if event == _DONE:
                        return
                    yield _parsed(event)
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(line) < 2 or not line[0].startswith("HTTP/") or not line[1].isdigit():
        raise ValueError(f"no answer in HTTP: {' '.join(line)!r}")
    headers: dict[str, str] = {}
    while (field := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = field.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(line[1]), headers


async def _pieces(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncGenerator[bytes, None]:
    """The body as it comes; chunks may begin and end anywhere in it."""
    while True:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            if not chunked:
                piece = await reader.read(1 << 16)
                if not piece:
                    return
            else:
                line = await reader.readline()
                try:
                    size = int(line.split(b";")[0], 16)
                except ValueError:
                    raise ValueError(f"the answer was cut off: {line[:40]!r} is no chunk") from None
                try:
                    piece = (await reader.readexactly(size + 2))[:-2]
                except asyncio.IncompleteReadError:
                    raise ValueError("the answer was cut off within a chunk") from None
                if size == 0:
                    return
        yield piece


async def _events(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[str, None]:
    """The data of each event; comments and other fields are passed over."""
    rest = b""
    data: list[str] = []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode()
            if not line and data:
                yield "\n".join(data)
                data = []
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
    if data or rest.strip():
        raise ValueError("the answer was cut off within an event")


async def _beginning(pieces: AsyncGenerator[bytes, None]) -> str:
    text = b""
    async for piece in pieces:
        text += piece
        if len(text) > 400:
            break
    return text[:400].decode(errors="replace").strip()


def _parsed(event: str) -> dict[str, Any]:
    try:
        values = json.loads(event)
    except ValueError:
        raise ValueError(f"an event is no JSON: {event[:200]!r}") from None
    if not isinstance(values, dict):
        raise ValueError(f"an event is no object: {event[:200]!r}")
    if error := values.get("error"):
        raise ValueError(f"the server says: {str(error)[:200]}")
    return values
