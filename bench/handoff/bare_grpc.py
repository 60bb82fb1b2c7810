"""BareStream: the limit of the gRPC lane: messages of the same size, and nothing else done."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from legato.worker.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVICE = "legato.bench.Limits"
_STREAM = "Stream"
_ANSWER = bytes(32)  # as long as a receipt
_TIMEOUT_S = 60.0


async def _answer_all(messages: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401  # gRPC's, of no type that is worth naming
    async for _ in messages:
        await context.write(_ANSWER)


def stream_handler() -> grpc.RpcMethodHandler[Any, Any]:
    """Answers each message with a few bytes."""
    return grpc.stream_stream_rpc_method_handler(_answer_all)


STREAM_HANDLERS = {_STREAM: stream_handler()}


class BareStream:
    """Messages of raw bytes on one stream, with a bounded number of bytes unanswered."""

    def __init__(self, address: str, message_bytes: int, num_bytes: int, window_bytes: int) -> None:
        """As many messages as `num_bytes` make; the last one may be shorter."""
        sizes = [message_bytes] * (num_bytes // message_bytes)
        if num_bytes % message_bytes:
            sizes.append(num_bytes % message_bytes)
        # Each of its own, as those of a transfer are: none is in a cache from the one before.
        self._messages = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
        self._window_bytes = max(window_bytes, message_bytes)
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def seconds(self) -> float:
        """From the first message until the last answer; the stream is open before."""
        method: Any = self._channel.stream_stream(f"/{SERVICE}/{_STREAM}")
        call = method(timeout=_TIMEOUT_S)
        await call.write(b"\0")
        await call.read()
        unanswered = 0
        room = asyncio.Event()

        async def write() -> None:
            nonlocal unanswered
            for message in self._messages:
                while unanswered + len(message) > self._window_bytes:
                    room.clear()
                    await room.wait()
                unanswered += len(message)
                await call.write(message)

        started_s = time.perf_counter()
        writing = asyncio.create_task(write())
        for message in self._messages:
            answer = await call.read()
            if answer is grpc.aio.EOF:
                writing.cancel()
                raise RuntimeError(f"the bare stream ended: {await call.details()}")
            unanswered -= len(message)
            room.set()
        elapsed_s = time.perf_counter() - started_s
        await writing
        call.cancel()
        return elapsed_s
