"""A receiver of the KV link in plain Python, which tests can tell to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import google_crc32c
import grpc
import numpy as np

from legato.protos.kv_transfer_pb2 import (
    KvAnswer,
    KvBeat,
    KvFrame,
    KvMemory,
    KvReceipt,
    KvRows,
    KvWelcome,
)
from legato.worker.channel import SERVER_OPTIONS
from legato.worker.handoff.frames import RowsFrame, header_checksum, read_frame
from legato.worker.kv.block_lease import LeaseReleasedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from legato.worker.kv.row_range import RowRange

    Context = grpc.aio.ServicerContext[Any, Any]

WORKER_ID = "decode-1"
HEADS, HEAD_DIM = 2, 8
ROW_BYTES = 2 * HEADS * HEAD_DIM * 4  # float32


class ArrayPager:
    """Reads rows of arrays [layers, 2, tokens, heads, head_dim]; a lease is any key of `arrays`."""

    def __init__(self) -> None:
        self.arrays: dict[object, np.ndarray[Any, Any]] = {}
        self.released: set[object] = set()
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None  # reads wait for it
        self.afters: list[object] = []

    async def read(
        self,
        lease: object,
        rows: RowRange,
        into: memoryview,
        seed: int,
        after: object | None = None,
    ) -> int:
        """As KvPager."""
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if lease in self.released:
            raise LeaseReleasedError
        self.afters.append(after)
        array = self.arrays[lease]
        part = array[
            rows.layer_start : rows.layer_end,
            :,
            rows.token_start : rows.token_end,
            rows.head_start : rows.head_start + rows.num_heads,
        ]
        data = part.tobytes()
        assert len(into) == len(data)
        into[:] = data
        return int(google_crc32c.extend(seed, data))


class ArrayMemory:
    """SenderMemory without a file: receivers of this process find it by its token."""

    made: dict[bytes, ArrayMemory] = {}  # noqa: RUF012  # shared on purpose

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        token = f"memory-{len(self.made)}".encode()
        self.made[token] = self
        self.description = KvMemory(token=token, slot_bytes=slot_bytes, num_slots=num_slots)
        self.is_closed = False
        self._bytes = bytearray(num_slots * slot_bytes)

    def slot(self, index: int) -> memoryview:
        """All of it."""
        assert not self.is_closed
        size = self.description.slot_bytes
        return memoryview(self._bytes)[index * size : (index + 1) * size]

    def close(self) -> None:
        """Once."""
        assert not self.is_closed
        self.is_closed = True


@dataclass
class Landing:
    """What has landed for one ticket."""

    rows: np.ndarray[Any, Any]
    has: np.ndarray[Any, Any]  # [layers, tokens]
    reused: int = 0
    num_opens: int = 0
    is_committed: bool = False
    is_given_up: bool = False


@dataclass
class FrameSeen:
    """One numbered frame as it came."""

    stream: int
    kind: str  # open, rows, commit, give_up
    epoch: int
    rows: KvRows | None = None
    num_bytes: int = 0


@dataclass
class LinkReceiver:
    """`fault(seen)` is asked for each numbered frame, in order of arrival: None, or what to do with
    it: "cut" (before it lands), "cut_after", "resend", "refuse", "silent", "wrong_sequence",
    "wrong_status", "hold" (lands; answered after `release`, as all that come behind it).
    """

    num_layers: int
    num_tokens: dict[int, int]  # by epoch
    fault: Callable[[FrameSeen], str | None] = lambda _: None
    reused: dict[int, int] = field(default_factory=dict)
    shared_memory: bool = False
    worker_id: str = WORKER_ID
    hello_status: tuple[grpc.StatusCode, str] | None = None
    seen: list[FrameSeen] = field(default_factory=list)
    landings: dict[int, Landing] = field(default_factory=dict)
    hellos: list[Any] = field(default_factory=list)
    beats: int = 0
    num_streams: int = 0
    is_mute: bool = False  # says nothing at all
    mute_streams: set[int] = field(default_factory=set)
    duplicates: Counter[int] = field(default_factory=Counter)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Its address."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._link)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("legato.v1.KvTransfer", {"Link": handler})]
        )
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            await server.stop(0)

    def landing(self, epoch: int) -> Landing:
        """New where it is not there yet."""
        if epoch not in self.landings:
            tokens = self.num_tokens[epoch]
            has = np.zeros((self.num_layers, tokens), dtype=bool)
            reused = self.reused.get(epoch, 0)
            has[:, :reused] = True
            shape = (self.num_layers, 2, tokens, HEADS, HEAD_DIM)
            self.landings[epoch] = Landing(np.zeros(shape, np.float32), has, reused)
        return self.landings[epoch]

    async def _link(self, stream: AsyncIterator[bytes], context: Context) -> None:
        self.num_streams += 1
        number = self.num_streams
        messages = aiter(stream)
        hello = read_frame(await anext(messages))
        assert isinstance(hello, KvFrame)
        self.hellos.append(hello.hello)
        if self.hello_status is not None:
            await context.abort(*self.hello_status)
        if self.is_mute:
            await asyncio.sleep(60)
        memory = ArrayMemory.made.get(hello.hello.memory.token) if self.shared_memory else None
        welcome = KvWelcome(worker_id=self.worker_id, shared_memory=memory is not None)
        await context.write(KvAnswer(welcome=welcome).SerializeToString())
        answers: asyncio.Queue[tuple[KvReceipt, bool]] = asyncio.Queue()
        writing = asyncio.Lock()  # gRPC takes one message at a time
        tasks = [
            asyncio.create_task(self._beat(context, number, writing)),
            asyncio.create_task(self._send(context, answers, writing)),
        ]
        sequence = 0
        try:
            async for message in messages:
                frame = read_frame(message)
                if isinstance(frame, KvFrame) and frame.HasField("beat"):
                    self.beats += 1
                    continue
                sequence += 1
                seen, got = self._seen(number, frame)
                assert got == sequence, "a gap in the numbers"
                self.seen.append(seen)
                action = self.fault(seen)
                if action == "cut":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if action == "silent":
                    self.mute_streams.add(number)
                    await asyncio.sleep(60)
                receipt = self._answer(seen, frame, memory, action)
                receipt.sequence, receipt.epoch = sequence, seen.epoch
                if action == "cut_after":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if action == "wrong_sequence":
                    receipt.sequence += 1
                if action == "wrong_status":
                    receipt.status = KvReceipt.STATUS_UNSPECIFIED
                answers.put_nowait((receipt, action == "hold"))
        finally:
            for task in tasks:
                task.cancel()

    async def _send(
        self,
        context: Context,
        answers: asyncio.Queue[tuple[KvReceipt, bool]],
        writing: asyncio.Lock,
    ) -> None:
        while True:
            receipt, is_held = await answers.get()
            if is_held:
                await self.release.wait()
            async with writing:
                await context.write(KvAnswer(receipt=receipt).SerializeToString())

    async def _beat(self, context: Context, stream: int, writing: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(0.1)
            if stream not in self.mute_streams:
                async with writing:
                    await context.write(KvAnswer(beat=KvBeat()).SerializeToString())

    def _seen(self, stream: int, frame: KvFrame | RowsFrame) -> tuple[FrameSeen, int]:
        if isinstance(frame, RowsFrame):
            header = frame.header
            seen = FrameSeen(stream, "rows", header.epoch, header, len(frame.data))
            return seen, header.sequence
        match frame.WhichOneof("frame"):
            case "open":
                return FrameSeen(stream, "open", frame.open.ticket.epoch), frame.open.sequence
            case "rows":
                rows = frame.rows
                num_bytes = rows.num_layers * rows.num_tokens * ROW_BYTES
                return FrameSeen(stream, "rows", rows.epoch, rows, num_bytes), rows.sequence
            case "close":
                kind = "commit" if frame.close.commit else "give_up"
                return FrameSeen(stream, kind, frame.close.epoch), frame.close.sequence
        raise AssertionError(f"what frame is {frame}?")

    def _answer(
        self,
        seen: FrameSeen,
        frame: KvFrame | RowsFrame,
        memory: ArrayMemory | None,
        action: str | None,
    ) -> KvReceipt:
        landing = self.landing(seen.epoch)
        if action == "refuse":
            landing.is_given_up = True
            return KvReceipt(status=KvReceipt.STATUS_REFUSED, reason="as the test wants")
        if seen.kind == "open":
            landing.num_opens += 1
            landed = [int(row.argmin()) if not row.all() else len(row) for row in landing.has]
            return KvReceipt(
                status=KvReceipt.STATUS_OK, landed_tokens=landed, reused_tokens=landing.reused
            )
        if landing.is_given_up and seen.kind != "give_up":
            return KvReceipt(status=KvReceipt.STATUS_REFUSED, reason="given up")
        if seen.kind == "give_up":
            landing.is_given_up = True
            return KvReceipt(status=KvReceipt.STATUS_OK)
        if seen.kind == "commit":
            assert isinstance(frame, KvFrame)
            assert landing.has.all(), "commit before all has landed"
            tokens = landing.has.shape[1]
            assert frame.close.num_rows == self.num_layers * (tokens - landing.reused)
            landing.is_committed = True
            return KvReceipt(status=KvReceipt.STATUS_COMMITTED)
        if action == "resend":
            return KvReceipt(status=KvReceipt.STATUS_RESEND)
        self._land(landing, seen, frame, memory)
        return KvReceipt(status=KvReceipt.STATUS_OK)

    def _land(
        self,
        landing: Landing,
        seen: FrameSeen,
        frame: KvFrame | RowsFrame,
        memory: ArrayMemory | None,
    ) -> None:
        header = seen.rows
        assert header is not None
        if isinstance(frame, RowsFrame):
            data = bytes(frame.data)
        else:
            assert memory is not None
            data = bytes(memory.slot(header.slot)[: seen.num_bytes])
        assert header_checksum(header) == header.header_crc32c
        assert google_crc32c.extend(header.header_crc32c, data) == header.crc32c
        shape = (header.num_layers, 2, header.num_tokens, header.num_kv_heads, HEAD_DIM)
        layers = slice(header.layer_start, header.layer_start + header.num_layers)
        tokens = slice(header.token_start, header.token_start + header.num_tokens)
        heads = slice(header.kv_head_start, header.kv_head_start + header.num_kv_heads)
        assert header.token_start >= landing.reused
        self.duplicates[seen.epoch] += int(landing.has[layers, tokens].sum())
        landing.rows[layers, :, tokens, heads] = np.frombuffer(data, np.float32).reshape(shape)
        landing.has[layers, tokens] = True
