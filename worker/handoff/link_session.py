"""LinkSession: one stream of frames from a prefill worker, and their answers in order."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from legato.protos.kv_transfer_pb2 import (
    KvAnswer,
    KvBeat,
    KvFrame,
    KvReceipt,
    KvRows,
    KvWelcome,
)
from legato.protos.printable import printable
from legato.worker.handoff.frames import MAX_PLAIN_BYTES, RowsFrame, read_frame
from legato.worker.handoff.incoming import LEASE_S, row_range
from legato.worker.handoff.session_transfers import MAX_REASON_CHARS, SessionTransfers
from legato.worker.handoff.shared_memory import MemoryRefusedError, ReceiverMemory, release

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from legato.protos.kv_transfer_pb2 import KvHello
    from legato.worker.handoff.receiver import KvReceiver

# What was read and is not answered: beyond that nothing is read, and gRPC makes the sender wait.
MAX_FRAMES_IN_HAND = 64
MAX_BYTES_IN_HAND = 8 << 20  # of messages: rows in the sender's memory are none of this worker's
BEAT_EVERY_S = 0.5
MAX_SILENCE_S = 2.5
# Frames in a row by which no row landed that was still to come, and nothing was committed. A sender
# that hears its answers sends a window of them at most; for one that does not, gRPC may take tens
# of thousands of answers before it makes this side wait. As many short answers are less than what a
# stream of HTTP/2 takes unread at least, 64 KiB: the status still gets through behind them.
MAX_VAIN_FRAMES = 1024


class BadFrameError(Exception):
    """The sender does not keep to the protocol."""


class LostFrameError(Exception):
    """A frame is missing in the sequence, or came twice."""


class SilenceError(Exception):
    """The sender neither says anything nor takes what is said."""


@dataclass(eq=False)
class _InHand:
    """A frame that is being handled: by a task, or as soon as all before it are answered."""

    sequence: int
    num_bytes: int
    task: asyncio.Task[KvReceipt] | None
    settle: Callable[[], KvReceipt] | None


class LinkSession:
    """Rows of several transfers are handled side by side; the pager takes them in their order.

    A refusal ends one transfer, never the stream. Whatever ends the stream breaks its transfers
    and frees nothing.
    """

    def __init__(
        self,
        receiver: KvReceiver,
        frames: AsyncIterator[bytes],
        write: Callable[[KvAnswer], Awaitable[None]],
        *,
        shared_memory: bool,
    ) -> None:
        """`shared_memory`: whether rows may come that way, where the sender offers it."""
        self._receiver = receiver
        self._frames = frames
        self._write = write
        self._takes_memory = shared_memory
        self._memory: ReceiverMemory | None = None
        self._transfers = SessionTransfers(receiver)
        self._next_sequence = 1
        self._clock = asyncio.get_running_loop().time
        self._heard_at_s = self._said_at_s = self._clock()
        self._reading_since_s: float | None = None  # since when the sender could have said more
        self._writing_since_s: float | None = None
        self._in_hand: deque[_InHand | None] = deque()  # None: the sender's end
        self._bytes_in_hand = 0
        self._more = asyncio.Event()  # in hand
        self._room = asyncio.Event()  # for one more
        self._turn = asyncio.Lock()  # to write: nothing that is being written is broken off

    async def run(self) -> None:
        """To the sender's end of the stream.

        Raises:
            RefusedError: its Hello does not fit this worker.
            BadFrameError, LostFrameError, SilenceError: the stream cannot go on.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            try:
                async with asyncio.timeout(MAX_SILENCE_S):
                    await self._greet()
            except TimeoutError:
                raise _silence() from None
            loop = asyncio.get_running_loop()
            answering = loop.create_task(self._answer_all())
            tasks = [answering, *map(loop.create_task, (self._read_all(), self._watch_clock()))]
            pending = set(tasks)
            while not answering.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            # The lease is counted from when the sender was last heard.
            lease_s = self._heard_at_s + LEASE_S - self._clock()
            self._transfers.break_off("its stream has ended", lease_s)
            try:
                await self._stop(tasks)
            finally:
                if self._memory is not None:
                    self._memory.close()

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """However often the call is cancelled meanwhile: no task is left behind."""
        stopping = asyncio.get_running_loop().create_task(self._stop_tasks(tasks))
        cancelled: asyncio.CancelledError | None = None
        while not stopping.done():
            try:
                await asyncio.wait((stopping,))
            except asyncio.CancelledError as error:
                cancelled = error
        stopping.result()
        if cancelled is not None:
            raise cancelled

    async def _stop_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        rows = [entry.task for entry in self._in_hand if entry is not None and entry.task]
        for each in rows:
            each.cancel()
        written_s = 0.0 if self._writing_since_s is None else self._clock() - self._writing_since_s
        with suppress(TimeoutError):  # the sender takes nothing
            async with asyncio.timeout(max(0.0, MAX_SILENCE_S - written_s)):
                await self._turn.acquire()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *rows, return_exceptions=True)

    async def _greet(self) -> None:
        frame = await self._next_frame(MAX_PLAIN_BYTES)
        if not isinstance(frame, KvFrame) or frame.WhichOneof("frame") != "hello":
            raise BadFrameError("the first frame is no hello")
        hello = frame.hello
        self._receiver.check(hello)
        self._transfers.sender_worker_id = printable(hello.sender_worker_id)
        welcome = KvWelcome(worker_id=self._receiver.worker_id)
        welcome.memory_refused = self._open_memory(hello)
        welcome.shared_memory = self._memory is not None
        await self._say(KvAnswer(welcome=welcome))

    def _open_memory(self, hello: KvHello) -> str:
        """Why not, or ""."""
        if not hello.HasField("memory"):
            return ""
        if not self._takes_memory:
            return "kv_lane of the receiver is grpc"
        try:
            self._memory = ReceiverMemory.open(hello.memory)
        except MemoryRefusedError as error:
            return str(error)[:MAX_REASON_CHARS]
        return ""

    # What the sender says.

    async def _read_all(self) -> None:
        while True:
            while (
                len(self._in_hand) >= MAX_FRAMES_IN_HAND or self._bytes_in_hand >= MAX_BYTES_IN_HAND
            ):
                self._room.clear()
                await self._room.wait()
            frame = await self._next_frame()
            if frame is None:
                self._in_hand.append(None)
                self._more.set()
                return
            self._take(frame)

    async def _next_frame(self, most_bytes: int | None = None) -> KvFrame | RowsFrame | None:
        """None: the sender has ended its side. A longer message is not looked at."""
        self._reading_since_s = self._clock()
        message = await anext(self._frames, None)
        self._reading_since_s = None
        self._heard_at_s = self._clock()
        if message is None:
            return None
        if most_bytes is not None and len(message) > most_bytes:
            raise BadFrameError(f"the first frame has {len(message)} bytes, limit {most_bytes}")
        try:
            return read_frame(message)
        except DecodeError as error:
            raise BadFrameError(
                f"the request of {len(message)} bytes is malformed: {error}"
            ) from None

    def _take(self, frame: KvFrame | RowsFrame) -> None:
        if isinstance(frame, RowsFrame):
            self._take_rows(frame.header, frame.data)
            return
        match frame.WhichOneof("frame"):
            case "open":
                self._check_sequence(frame.open.sequence)
                # At once: its rows may follow before it is answered.
                receipt = self._transfers.open(frame.open)
                self._hold(frame.open.sequence, 0, None, lambda: receipt)
            case "rows":
                self._take_rows(frame.rows, self._data_in_memory(frame.rows))
            case "close":
                close = frame.close
                self._check_sequence(close.sequence)
                # What came before is to land first.
                self._hold(close.sequence, 0, None, self._transfers.closing(close))
            case "beat":
                pass
            case "hello":
                raise LostFrameError("hello came twice")
            case other:
                raise BadFrameError(f"frame is {other}, open, rows, close or beat is expected now")

    def _data_in_memory(self, header: KvRows) -> memoryview | None:
        """The rows in the sender's memory, where they may change at any time: see `KvPager.write`.
        None where there can be none.
        """
        if header.WhichOneof("rows") != "slot":
            return memoryview(b"")
        if self._memory is None:
            raise BadFrameError("rows.slot: no shared memory was agreed upon")
        rows = row_range(header)
        if rows is None:
            return None
        try:
            return self._memory.slot(header.slot, self._receiver.wire.num_bytes(rows))
        except ValueError:
            return None

    def _take_rows(self, header: KvRows, data: memoryview | None) -> None:
        self._check_sequence(header.sequence)
        task = asyncio.get_running_loop().create_task(self._transfers.landing(header, data))
        if data is not None:
            # Else whatever keeps an exception keeps the sender's memory, and its file, open.
            task.add_done_callback(lambda _: release(data))
        num_bytes = len(data) if data is not None and header.WhichOneof("rows") is None else 0
        self._hold(header.sequence, num_bytes, task, None)

    def _check_sequence(self, sequence: int) -> None:
        if sequence != self._next_sequence:
            raise LostFrameError(
                f"sequence is {sequence}, {self._next_sequence} is next: frames are lost or doubled"
            )
        self._next_sequence += 1
        self._transfers.num_vain_frames += 1
        if self._transfers.num_vain_frames > MAX_VAIN_FRAMES:
            raise SilenceError(
                f"no answer is heard: {MAX_VAIN_FRAMES} frames in a row were in vain"
            )

    def _hold(
        self,
        sequence: int,
        num_bytes: int,
        task: asyncio.Task[KvReceipt] | None,
        settle: Callable[[], KvReceipt] | None,
    ) -> None:
        self._in_hand.append(_InHand(sequence, num_bytes, task, settle))
        self._bytes_in_hand += num_bytes
        self._more.set()

    # What is said to the sender.

    async def _answer_all(self) -> None:
        while True:
            while not self._in_hand:
                self._more.clear()
                await self._more.wait()
            entry = self._in_hand[0]
            if entry is None:
                return
            if entry.task is not None:
                receipt = await entry.task
            else:
                assert entry.settle is not None
                receipt = entry.settle()
            receipt.sequence = entry.sequence
            await self._say(KvAnswer(receipt=receipt))
            self._in_hand.popleft()
            self._bytes_in_hand -= entry.num_bytes
            self._room.set()

    async def _say(self, answer: KvAnswer) -> None:
        async with self._turn:
            self._writing_since_s = self._clock()
            await self._write(answer)
            self._writing_since_s = None
            self._said_at_s = self._clock()

    # The clock: one for all waits, since each timer of its own costs more than what it guards.

    async def _watch_clock(self) -> None:
        """Says that this side is still there, where nothing else says so; raises SilenceError."""
        tick_s = BEAT_EVERY_S / 4
        while True:
            slept_at_s = self._clock()
            await asyncio.sleep(tick_s)
            now_s = self._clock()
            # This process stood still: what came meanwhile is still to be read.
            late_s = max(0.0, now_s - slept_at_s - 2 * tick_s)
            for since_s, error in (
                (self._reading_since_s, _silence),
                (self._writing_since_s, _deafness),
            ):
                if since_s is not None and now_s - since_s - late_s > MAX_SILENCE_S:
                    raise error()
            if now_s - self._said_at_s + tick_s > BEAT_EVERY_S and not self._turn.locked():
                try:
                    async with asyncio.timeout(MAX_SILENCE_S):
                        await self._say(KvAnswer(beat=KvBeat()))
                except TimeoutError:
                    raise _deafness() from None


def _silence() -> SilenceError:
    return SilenceError(f"nothing was heard for {MAX_SILENCE_S:g} s")


def _deafness() -> SilenceError:
    return SilenceError(f"no answer was taken for {MAX_SILENCE_S:g} s")
