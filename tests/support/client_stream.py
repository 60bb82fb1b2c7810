"""Stream: one request of a client to a service with the fake model, read as it comes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from table_state import MODEL, PROMPT
from worker_pair import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.protos import generation_pb2


@dataclass(eq=False)
class Stream:
    """One request of a client, read as it comes."""

    call: Any
    asked_at_s: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    finish: generation_pb2.Finish | None = None
    error: grpc.aio.AioRpcError | None = None
    reading: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self.call:
                assert self.finish is None, "nothing comes after the finish"
                if response.HasField("finish"):
                    self.finish = response.finish
                    continue
                assert response.delta.token_offset == len(self.tokens), "a token lost or doubled"
                self.tokens += response.delta.token_ids
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:  # gRPC's answer to a cancel of our own call
            if not self.call.cancelled():
                raise

    async def exact(self, prompt: Sequence[int] = PROMPT) -> generation_pb2.Timings:
        """To its end, which is a good one with every token right."""
        await asyncio.wait_for(self.reading, WAIT_S)
        assert self.error is None, self.error
        assert self.finish is not None
        assert self.tokens == MODEL.expected(prompt, len(self.tokens))
        assert len(self.tokens) == self.finish.usage.completion_tokens
        return self.finish.timings
