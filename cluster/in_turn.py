"""InTurn: the messages of one stream to its client, one at a time, the first with its start."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.cluster.answer_life import Send
    from legato.cluster.prompt_logprobs import PromptLogprobs
    from legato.protos import generation_pb2


class InTurn:
    """Hands messages to gRPC, which takes one of a call at a time. The first one has the start, and
    what is to be told of the prompt.
    """

    def __init__(
        self, start: generation_pb2.StreamStart, prompt: PromptLogprobs, send: Send
    ) -> None:
        self._start: generation_pb2.StreamStart | None = start
        self._prompt = prompt
        self._send = send
        self._sending = asyncio.Lock()

    async def __call__(self, response: generation_pb2.GenerateResponse) -> None:
        """Returns when the client's flow control took it."""
        async with self._sending:
            if self._start is not None:
                response.start.CopyFrom(self._start)
                await self._prompt.put_on(response)
                self._start = None
            await self._send(response)
