"""LinkProxy: stands between a prefill and a decode worker and damages one message of a Link."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from legato.worker.channel import CHANNEL_OPTIONS, SERVER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LINK = "/legato.v1.KvTransfer/Link"
KINDS = ("cut", "stall", "duplicate", "reorder", "truncate", "flip")
DIRECTIONS = ("frames", "answers")
REORDER_WAIT_S = 0.3  # for a message to change places with


@dataclass(frozen=True)
class Fault:
    """What becomes of message `index` (from 0, the Hello or Welcome) of one direction, once."""

    kind: str
    direction: str
    index: int
    bit: int = 0  # which one is flipped, modulo the message's bits

    def __str__(self) -> str:
        return f"{self.kind} of {self.direction}[{self.index}], bit {self.bit}"


class CutError(Exception):
    """The stream ends here."""


class LinkProxy(grpc.GenericRpcHandler):
    """Forwards bytes as they are; the first stream that reaches the fault's message has it."""

    def __init__(self, target: str, fault: Fault | None = None) -> None:
        self.fault = fault
        self.fired = False
        self.address = ""
        self.num_streams = 0
        self.num_messages = dict.fromkeys(DIRECTIONS, 0)  # of all streams, as they came
        self.frames: list[bytes] = []  # likewise
        # Frames from this one on, or from the first that `gate_when` is true of, wait for `gate`.
        self.gate_at: int | None = None
        self.gate_when: Callable[[bytes], bool] | None = None
        self.gate = asyncio.Event()
        self.num_waiting = 0  # streams
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))

    async def __aenter__(self) -> LinkProxy:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:  # noqa: ANN401  # gRPC keeps the type to itself
        if handler_call_details.method != LINK:
            return None
        return grpc.stream_stream_rpc_method_handler(self._link)

    async def _link(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self.num_streams += 1
        call = self._channel.stream_stream(LINK)()
        up = asyncio.create_task(self._forward_frames(frames, call))
        down = asyncio.create_task(self._pump("answers", _messages(call), context.write))
        try:
            done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            await context.abort(await call.code(), await call.details() or "")
        except CutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            up.cancel()
            down.cancel()
            call.cancel()

    async def _forward_frames(self, frames: AsyncIterator[bytes], call: Any) -> None:  # noqa: ANN401
        await self._pump("frames", frames, call.write)
        await call.done_writing()

    async def _pump(
        self, direction: str, messages: AsyncIterator[bytes], write: Callable[[bytes], Any]
    ) -> None:
        index = -1
        held: bytes | None = None
        reading = asyncio.ensure_future(anext(messages, None))
        try:
            while True:
                await asyncio.wait({reading}, timeout=None if held is None else REORDER_WAIT_S)
                if not reading.done():  # nothing comes to change places with
                    assert held is not None
                    await write(held)
                    held = None
                    continue
                message = reading.result()
                if message is None:
                    break
                reading = asyncio.ensure_future(anext(messages, None))
                index += 1
                self.num_messages[direction] += 1
                if direction == "frames":
                    self.frames.append(message)
                    if self._waits(index, message):
                        self.num_waiting += 1
                        try:
                            await self.gate.wait()
                        finally:
                            self.num_waiting -= 1
                fault = self.fault
                hit = fault is not None and (fault.direction, fault.index) == (direction, index)
                if fault is None or not hit or self.fired:
                    await write(message)
                elif fault.kind == "reorder":
                    self.fired = True
                    held = message
                    continue
                else:
                    self.fired = True
                    for damaged in await self._damage(fault, message):
                        await write(damaged)
                if held is not None:
                    await write(held)
                    held = None
            if held is not None:
                await write(held)
        finally:
            reading.cancel()

    def _waits(self, index: int, frame: bytes) -> bool:
        if self.gate_when is not None and self.gate_when(frame):
            return True
        return self.gate_at is not None and index >= self.gate_at

    async def _damage(self, fault: Fault, message: bytes) -> list[bytes]:
        match fault.kind:
            case "cut":
                raise CutError
            case "stall":
                await asyncio.Event().wait()  # until a side gives the stream up
            case "duplicate":
                return [message, message]
            case "truncate":
                return [message[: len(message) // 2]]
            case "flip" if message:
                place = fault.bit % (len(message) * 8)
                out = bytearray(message)
                out[place // 8] ^= 1 << place % 8
                return [bytes(out)]
        return [message]


async def _messages(call: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
