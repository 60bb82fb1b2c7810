"""GenerationResponse: serves one HTTP request by the router, for as long as its client is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING

import grpc
from starlette.responses import Response

from legato.cluster.errors import ClientGoneError, RequestError
from legato.cluster.http.chunks import DONE, Chunks
from legato.cluster.http.completion import Completion
from legato.cluster.http.error_response import json_response
from legato.cluster.http.whole_answer import WholeAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

    from legato.cluster.http.completion import Piece, Wanted
    from legato.cluster.router import Router
    from legato.protos import generation_pb2

    Take = Callable[[Piece], Awaitable[None]]

log = logging.getLogger(__name__)


def internal_error(error: Exception) -> RequestError:
    """Logs what is a fault of ours, and says where it is logged."""
    reference = uuid.uuid4().hex[:12]
    log.error("internal error, reference %s", reference, exc_info=error)
    return RequestError(grpc.StatusCode.INTERNAL, f"internal error; the log has it as {reference}")


class GenerationResponse(Response):
    """Runs when it is sent. Nothing is sent before the first token, or a whole answer, is there:
    what fails until then has a status of its own; later, an event that ends the stream.

    A client that goes away has its requests cancelled at once, with all that they hold.
    """

    def __init__(
        self,
        router: Router,
        wanted: Wanted,
        time_left_s: float | None,
        headers: Mapping[str, str],
    ) -> None:
        """`headers`: the client's."""
        super().__init__()
        self._router = router
        self._wanted = wanted
        self._time_left_s = time_left_s
        self._request_headers = headers
        self._completion = Completion(wanted, router.text)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError while nothing has been sent, ClientGoneError where nobody is left."""
        serve = self._stream(send) if self._wanted.stream else self._whole(scope, receive, send)
        await _while_there(serve, receive)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = WholeAnswer(self._completion)

        async def take(piece: Piece) -> None:
            answer.add(piece)

        await self._generate(take)
        await json_response(answer.object())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        stream = _EventStream(send)
        chunks = Chunks(self._completion)

        async def take(piece: Piece) -> None:
            await stream.write(chunks.of(piece))

        try:
            await self._generate(take)
            if self._wanted.include_usage:
                await stream.write(chunks.usage())
        except RequestError as error:
            if not stream.begun:
                raise
            await stream.write(chunks.error(error))
        except Exception as error:
            if not stream.begun or isinstance(error, ClientGoneError):
                raise
            await stream.write(chunks.error(internal_error(error)))
        await stream.end()

    async def _generate(self, take: Take) -> None:
        """All prompts at once; the first that fails ends the others."""
        if len(self._wanted.requests) == 1:
            await self._generate_one(0, take)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(self._wanted.requests)):
                    group.create_task(self._generate_one(prompt, take))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _generate_one(self, prompt: int, take: Take) -> None:
        completion = self._completion

        async def deliver(response: generation_pb2.GenerateResponse) -> None:
            await take(completion.take(prompt, response))

        with self._wanted.names.used(prompt):
            await self._router.generate(
                self._wanted.requests[prompt],
                deliver,
                self._time_left_s,
                lambda spec: completion.begin(prompt, spec),
                headers=self._request_headers,
            )


class _EventStream:
    """The connection: headers go out with the first event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._starting = asyncio.Lock()  # several prompts may have their first token at once
        self.begun = False

    async def write(self, events: bytes) -> None:
        """Returns when the client's flow control took it."""
        if not self.begun:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """By the word that clients wait for."""
        if not self.begun:
            await self._start()
        await self._send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _start(self) -> None:
        async with self._starting:
            if self.begun:
                return
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # proxies would hold tokens back
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.begun = True


async def _while_there(serve: Coroutine[None, None, None], receive: Receive) -> None:
    """Cancels `serve` when the client closes the connection.

    Raises:
        ClientGoneError: it did.
    """
    serving, leaving = asyncio.create_task(serve), asyncio.create_task(_gone(receive))
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
