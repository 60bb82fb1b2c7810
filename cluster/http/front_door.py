"""FrontDoor: what every request passes: credentials, and the words for what goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.caller import CALLER
from legato.cluster.errors import ClientGoneError, RequestError
from legato.cluster.http.error_response import error_response
from legato.cluster.http.generation import internal_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from legato.cluster.caller import Caller

    Authorize = Callable[[str | None], Caller]

# For who has no credentials. The page tells nothing of the service: it asks for a token where the
# routes that feed it want one.
OPEN_PATHS = ("/health", "/")
REQUEST_ID = b"x-request-id"


class FrontDoor:
    """ASGI middleware. `authorize` gets the Authorization header, and raises RequestError."""

    def __init__(self, app: ASGIApp, authorize: Authorize | None) -> None:
        self._app = app
        self._authorize = authorize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that has gone is told nothing."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if not begun and message["type"] == "http.response.start":
                begun = True
                if request_id is not None:
                    message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        try:
            if self._authorize is not None and scope["path"] not in OPEN_PATHS:
                given = headers.get(b"authorization")
                CALLER.set(self._authorize(None if given is None else given.decode("latin-1")))
            await self._app(scope, receive, answer)
        except ClientGoneError:
            return
        except RequestError as error:
            await error_response(error)(scope, receive, answer)
        except Exception as error:
            if begun:
                raise
            await error_response(internal_error(error))(scope, receive, answer)
