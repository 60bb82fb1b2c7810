"""LinkProxy: stands between a prefill and a decode worker and damages one message of a Link."""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from legato.protos.kv_transfer_pb2 import KvAnswer, KvBeat, KvFrame, KvReceipt, KvRows
from legato.worker.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from legato.worker.handoff.frames import RowsFrame, read_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LINK = "/legato.v1.KvTransfer/Link"
KINDS = ("cut", "stall", "duplicate", "reorder", "truncate", "flip")
DIRECTIONS = ("frames", "answers")
BEATS = {
    "frames": KvFrame(beat=KvBeat()).SerializeToString(),
    "answers": KvAnswer(beat=KvBeat()).SerializeToString(),
}
REORDER_WAIT_S = 0.3  # for a message to change places with


@dataclass(frozen=True)
class Fault:
    """What becomes of message `index` (from 0, the Hello or Welcome) of one direction, once. Beats,
    which come at any time, do not count.

    The direction "rows" counts frames with rows, and a flip there strikes the rows themselves,
    inside the message or in shared memory.
    """

    kind: str
    direction: str
    index: int
    bit: int = 0  # which one is flipped, modulo the bits of the message or of its rows

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
        self.num_rows_frames = 0
        self.num_refused = 0  # answers that say that rows, or a transfer, are not as they should be
        self.num_broken = 0  # streams that one of the sides has ended before its time
        self.has_swapped = False  # by a reorder; else nothing came to change places with
        self.struck: bytes | None = None  # the message, as it came
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
            self.num_broken += await call.code() is not grpc.StatusCode.OK
            await context.abort(await call.code(), await call.details() or "")
        except CutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.num_broken += 1
            await context.abort(await call.code(), await call.details() or "")
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
                if is_beat(direction, message):
                    await write(message)
                    continue
                index += 1
                self.num_messages[direction] += 1
                if direction == "answers":
                    self.num_refused += refuses(message)
                else:
                    self.frames.append(message)
                    if self._waits(index, message):
                        self.num_waiting += 1
                        try:
                            await self.gate.wait()
                        finally:
                            self.num_waiting -= 1
                fault = self._fault_of(direction, index, message)
                if fault is None:
                    await write(message)
                else:
                    self.fired, self.struck = True, message
                    if fault.kind == "reorder":
                        held = message
                        continue
                    for damaged in await self._damage(fault, message):
                        await write(damaged)
                if held is not None:
                    await write(held)
                    held = None
                    self.has_swapped = True
            if held is not None:
                await write(held)
        finally:
            reading.cancel()

    def _waits(self, index: int, frame: bytes) -> bool:
        if self.gate_when is not None and self.gate_when(frame):
            return True
        return self.gate_at is not None and index >= self.gate_at

    def _fault_of(self, direction: str, index: int, message: bytes) -> Fault | None:
        """The fault, where this is the message that has it."""
        fault = self.fault
        rows_index = None
        if direction == "frames" and rows_of(message) is not None:
            rows_index = self.num_rows_frames
            self.num_rows_frames += 1
        if fault is None or self.fired:
            return None
        at = rows_index if fault.direction == "rows" else index
        side = "frames" if fault.direction == "rows" else fault.direction
        return fault if (side, fault.index) == (direction, at) else None

    async def _damage(self, fault: Fault, message: bytes) -> list[bytes]:
        if fault.direction == "rows":
            return [self._flip_in_rows(message, fault.bit)]
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

    def _flip_in_rows(self, message: bytes, bit: int) -> bytes:
        rows = rows_of(message)
        assert rows is not None
        if isinstance(rows, RowsFrame):
            place = bit % (len(rows.data) * 8) + (len(message) - len(rows.data)) * 8
            out = bytearray(message)
            out[place // 8] ^= 1 << place % 8
            return bytes(out)
        memory = KvFrame.FromString(self.frames[0]).hello.memory
        # An element a head at least: K and V of float32.
        num_bytes = rows.num_layers * 2 * rows.num_tokens * rows.num_kv_heads * 4
        place = bit % (num_bytes * 8)
        at = memory.slots_offset + rows.slot * memory.slot_bytes + place // 8
        file = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with mmap.mmap(file, at + 1) as mapped:
                mapped[at] ^= 1 << place % 8
        finally:
            os.close(file)
        return message


def is_beat(direction: str, message: bytes) -> bool:
    """Whether it says no more than that its writer lives."""
    return message == BEATS[direction]


def rows_of(message: bytes) -> RowsFrame | KvRows | None:
    """RowsFrame: with the rows inside; KvRows: they are in shared memory; None: no rows at all."""
    try:
        frame = read_frame(message)
    except DecodeError:
        return None
    if isinstance(frame, RowsFrame):
        return frame
    return frame.rows if frame.WhichOneof("frame") == "rows" else None


def refuses(answer: bytes) -> bool:
    """Whether it says that something was damaged, or comes amiss."""
    status = KvAnswer.FromString(answer).receipt.status
    return status in (KvReceipt.STATUS_RESEND, KvReceipt.STATUS_REFUSED)


async def _messages(call: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
