"""LiveResponse: events over HTTP for as long as the client is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from legato.cluster.errors import ClientGoneError, RequestError
from legato.cluster.http.error_response import error_object
from legato.cluster.http.generation import internal_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    Write = Callable[[str, Any], Awaitable[None]]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies would hold events back
    (b"x-content-type-options", b"nosniff"),
]


class LiveResponse(Response):
    """`serve` writes events by name and JSON value; the response ends when it returns. Until the
    first one an error has a status of its own; then it is the last event.
    """

    def __init__(self, serve: Callable[[Write], Awaitable[None]]) -> None:
        super().__init__()
        self._serve = serve
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientGoneError where the client left."""
        serving = asyncio.ensure_future(self._run(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            serving.cancel()  # where it has ended, this does nothing
            await asyncio.wait({serving, leaving})
        with contextlib.suppress(asyncio.CancelledError):
            serving.result()
            return
        raise ClientGoneError

    async def _run(self, send: Send) -> None:
        async def write(event: str, value: Any) -> None:  # noqa: ANN401  # any JSON
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            data = f"event: {event}\ndata: {json.dumps(value)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._serve(write)
        except RequestError as error:
            if not self._begun:
                raise
            await write("error", error_object(error)["error"])
        except Exception as error:
            if not self._begun or isinstance(error, ClientGoneError):
                raise
            await write("error", error_object(internal_error(error))["error"])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
