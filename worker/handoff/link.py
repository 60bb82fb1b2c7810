"""Link: one stream of frames to a decode worker, which carries all transfers to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from legato.protos import kv_transfer_pb2
from legato.protos.kv_transfer_pb2 import KvAnswer, KvBeat, KvFrame, KvHello, KvReceipt, KvRows
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.handoff.lanes import GrpcLane, Lane, MemoryLane, Packed
from legato.worker.handoff.shared_memory import MemoryRefusedError
from legato.worker.handoff.transfer import ChunkSize, Control, HandoffError, Piece, Stage, Transfer
from legato.worker.handoff.turns import Turns
from legato.worker.identity import PROTOCOL_VERSION
from legato.worker.kv.block_lease import LeaseReleasedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.handoff.shared_memory import SenderMemory
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.pager import KvPager

    Call = grpc.aio.StreamStreamCall[bytes, bytes]

_log = logging.getLogger(__name__)
_METHOD = "/{}/Link".format(kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name)
# Sent and not answered, each bounds the memory of both sides and what a new transfer waits for.
WINDOW_BYTES = 4 << 20
WINDOW_CHUNKS = 16
BEAT_S = 0.5
SILENCE_S = 2.5
# The receiver lives, but does not get on with what was sent.
ANSWER_TIMEOUT_S = 5.0
IDLE_S = 30.0
LAST_SEQUENCE = (1 << 32) - 1
# The receiver has understood and does not want: it would not another time either.
_FINAL_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class LinkBrokenError(Exception):
    """The stream is over; its transfers may go on over another one."""


@dataclass(frozen=True)
class LinkParts:
    """What all links of a worker share."""

    identity: Identity
    kv_wire: str
    size: ChunkSize
    pager: KvPager
    counters: TransferCounters
    # Slots, and bytes of each. None: rows go inside gRPC's messages alone.
    new_memory: Callable[[int, int], SenderMemory] | None


@dataclass(eq=False)
class _Frame:
    """Numbered."""

    sequence: int
    transfer: Transfer
    what: Control | Piece
    message: bytes
    packed: Packed | None = None  # of rows


@dataclass(eq=False)
class _RowsFrame:
    """Numbered; its rows are being read."""

    sequence: int
    transfer: Transfer
    piece: Piece
    packing: asyncio.Task[Packed]


class Link:
    """Runs from `start` until it breaks, or has been idle for IDLE_S.

    Frames take their numbers in the order in which they are made. While gRPC takes one, the rows of
    the next two are read, so that the pager's thread need not wait for the event loop.
    """

    def __init__(self, address: str, receiver_worker_id: str, parts: LinkParts) -> None:
        self.address = address
        self.is_open = True
        self.is_welcome = asyncio.Event()
        self._receiver_worker_id = receiver_worker_id
        self._parts = parts
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Call = self._channel.stream_stream(_METHOD)()
        self._memory: SenderMemory | None = None
        self._lane: Lane = GrpcLane()
        self._transfers: dict[Transfer, None] = {}
        self._turns = Turns()
        self._news = asyncio.Event()
        self._sequence = 0
        self._outbox: asyncio.Queue[_Frame | _RowsFrame | KvBeat] = asyncio.Queue(maxsize=1)
        self._packings: set[asyncio.Task[Packed]] = set()
        self._unanswered: deque[_Frame] = deque()
        self._window_bytes = 0  # of chunks from their making to their answer
        self._window_chunks = 0
        now_s = time.monotonic()
        self._heard_at_s = self._said_at_s = self._answered_at_s = self._used_at_s = now_s

    async def carry(self, transfer: Transfer) -> None:
        """Returns when the receiver has committed. Cancelled, it tells the receiver.

        Raises:
            HandoffError: it is over for good.
            LinkBrokenError: the link is over.
        """
        assert self.is_open
        ended = transfer.attach(time.monotonic())
        self._transfers[transfer] = None
        self._kick(transfer)
        watches = [
            asyncio.create_task(self._watch_progress(transfer)),
            asyncio.create_task(self._watch_confirmed(transfer)),
        ]
        try:
            await ended
        finally:
            for watch in watches:
                watch.cancel()
            transfer.give_up()
            self._transfers.pop(transfer, None)
            self._used_at_s = time.monotonic()
            self._kick(transfer)

    async def run(self) -> None:
        """The link's life. Cancelling it ends the link at once."""
        tasks = [
            asyncio.create_task(work)
            for work in (self._converse(), self._watch_clock(), self._make_frames(), self._write())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.is_open = False
            self._end_transfers(_reason(tasks))
            for task in tasks:
                task.cancel()
            await self._channel.close()
            for packing in self._packings:
                packing.cancel()
            # Until the pager's thread is through.
            await asyncio.gather(*tasks, *self._packings, return_exceptions=True)
            if self._memory is not None:
                self._memory.close()

    # Which frame is next.

    def _kick(self, transfer: Transfer) -> None:
        """Something is new with it."""
        self._turns.add(transfer)
        self._news.set()

    async def _watch_progress(self, transfer: Transfer) -> None:
        while True:
            await transfer.progress.changed()
            self._kick(transfer)

    async def _watch_confirmed(self, transfer: Transfer) -> None:
        await transfer.progress.confirmed()
        transfer.is_confirmed = True
        self._kick(transfer)

    def _may_send_rows(self) -> bool:
        if not self._window_chunks:
            return True
        return (
            self._window_chunks < WINDOW_CHUNKS
            and self._window_bytes + self._parts.size.largest_bytes <= WINDOW_BYTES
        )

    async def _make_frames(self) -> None:
        await self.is_welcome.wait()
        while True:
            turn = self._turns.next(self._may_send_rows(), time.monotonic())
            if turn is None:
                self._news.clear()
                await self._news.wait()
                continue
            transfer, what = turn
            if self._sequence == LAST_SEQUENCE:
                raise LinkBrokenError("the numbers of its frames are used up")
            self._sequence += 1
            if isinstance(what, Piece):
                await self._outbox.put(self._rows_frame(transfer, what, self._sequence))
            else:
                await self._outbox.put(_control_frame(transfer, what, self._sequence))

    def _rows_frame(self, transfer: Transfer, piece: Piece, sequence: int) -> _RowsFrame:
        rows, progress, ticket = piece.rows, transfer.progress, transfer.ticket
        lease = progress.lease
        assert lease is not None, "there before the first row is"
        header = KvRows(
            epoch=ticket.epoch,
            attempt=ticket.key.attempt,
            layer_start=rows.layer_start,
            num_layers=rows.num_layers,
            token_start=rows.token_start,
            num_tokens=rows.num_tokens,
            kv_head_start=rows.head_start,
            num_kv_heads=rows.num_heads,
            sequence=sequence,
        )
        after = progress.after(rows.layer_end - 1)

        async def fill(into: memoryview, seed: int) -> int:
            return await self._parts.pager.read(lease, rows, into, seed, after)

        self._window_bytes += piece.num_bytes
        self._window_chunks += 1
        packing = asyncio.create_task(self._lane.pack(header, piece.num_bytes, fill))
        self._packings.add(packing)
        return _RowsFrame(sequence, transfer, piece, packing)

    async def _packed(self, frame: _RowsFrame) -> _Frame:
        """With the message. Where its rows cannot be read, or need not go since its transfer ended
        meanwhile, the frame that gives that up: the number must go.
        """
        packing, transfer = frame.packing, frame.transfer
        await asyncio.wait([packing])
        self._packings.discard(packing)
        error = packing.exception()
        if error is None and transfer.stage is Stage.OPEN:
            packed = packing.result()
            return _Frame(frame.sequence, transfer, frame.piece, packed.message, packed)
        if error is None:
            self._lane.free(packing.result())
        elif isinstance(error, LeaseReleasedError):
            transfer.fail(
                HandoffError("the request is over, its blocks are gone", decode_lost=False)
            )
        else:
            _log.error("KV rows cannot be read", exc_info=error)
            why = f"KV rows cannot be read: {type(error).__name__}: {error}"
            transfer.fail(HandoffError(why, decode_lost=False))
        self._leave_window(frame.piece)
        return _control_frame(transfer, Control.GIVE_UP, frame.sequence)

    def _leave_window(self, piece: Piece) -> None:
        self._window_bytes -= piece.num_bytes
        self._window_chunks -= 1
        self._news.set()

    # The stream.

    async def _write(self) -> None:
        while self.is_open:
            frame = await self._outbox.get()
            if isinstance(frame, KvBeat):
                await self._say(KvFrame(beat=frame).SerializeToString())
                continue
            if isinstance(frame, _RowsFrame):
                frame = await self._packed(frame)
            if not self._unanswered:
                self._answered_at_s = time.monotonic()
            self._unanswered.append(frame)
            await self._say(frame.message)
            if frame.packed is not None:
                self._lane.count(frame.packed, self._parts.counters)

    async def _say(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._end_of_call() from None
        self._said_at_s = time.monotonic()

    async def _hear(self) -> KvAnswer:
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._end_of_call() from None
        if not isinstance(message, bytes):
            raise await self._end_of_call()
        if not self.is_open:  # gRPC may keep a cancellation to itself
            raise LinkBrokenError("it was closed")
        self._heard_at_s = time.monotonic()
        try:
            return KvAnswer.FromString(message)
        except DecodeError as error:
            raise LinkBrokenError(f"it answered what is malformed: {error}") from None

    async def _end_of_call(self) -> Exception:
        code, details = await self._call.code(), await self._call.details()
        text = f"it ended the stream: {code.name} {details}"
        if code in _FINAL_CODES:
            return HandoffError(f"decode worker at {self.address}: {text}", decode_lost=True)
        return LinkBrokenError(text)

    async def _converse(self) -> None:
        await self._say(KvFrame(hello=self._hello()).SerializeToString())
        answer = await self._hear()
        if answer.WhichOneof("answer") != "welcome":
            raise LinkBrokenError("its first answer is no welcome")
        welcome = answer.welcome
        if welcome.worker_id != self._receiver_worker_id:
            raise HandoffError(
                f"decode worker at {self.address} is {welcome.worker_id!r}, the ticket is of "
                f"{self._receiver_worker_id!r}",
                decode_lost=True,
            )
        if self._memory is not None:
            if welcome.shared_memory:
                self._lane = MemoryLane(self._memory, WINDOW_CHUNKS)
            else:
                _log.info(
                    "KV to %s goes by gRPC, not by shared memory: %s",
                    self.address,
                    welcome.memory_refused,
                )
                self._memory.close()
                self._memory = None
        self.is_welcome.set()
        while True:
            answer = await self._hear()
            match answer.WhichOneof("answer"):
                case "receipt":
                    self._settle(answer.receipt)
                case "beat":
                    pass
                case other:
                    raise LinkBrokenError(f"it answered {other} out of turn")

    def _hello(self) -> KvHello:
        identity = self._parts.identity
        hello = KvHello(
            protocol_version=PROTOCOL_VERSION,
            sender_worker_id=identity.worker_id,
            receiver_worker_id=self._receiver_worker_id,
            model_fingerprint=identity.model_fingerprint,
            weights=identity.weights,
            layout=identity.kv_layout(),
            kv_wire=self._parts.kv_wire,
        )
        if self._parts.new_memory is not None:
            try:
                self._memory = self._parts.new_memory(WINDOW_CHUNKS, self._parts.size.largest_bytes)
                hello.memory.CopyFrom(self._memory.description)
            except MemoryRefusedError as error:
                _log.warning("KV to %s goes by gRPC: %s", self.address, error)
        return hello

    # The receiver's answers.

    def _settle(self, receipt: KvReceipt) -> None:
        if not self._unanswered or self._unanswered[0].sequence != receipt.sequence:
            raise LinkBrokenError(f"it answered frame {receipt.sequence} out of turn")
        frame = self._unanswered.popleft()
        self._answered_at_s = time.monotonic()
        self._free(frame)
        if frame.transfer.has_ended:
            return
        try:
            self._tell(frame, receipt)
        except HandoffError as error:
            frame.transfer.fail(error)
        self._kick(frame.transfer)

    def _tell(self, frame: _Frame, receipt: KvReceipt) -> None:
        transfer, what, counters = frame.transfer, frame.what, self._parts.counters
        status = receipt.status
        if status == KvReceipt.STATUS_REFUSED:
            transfer.refused(receipt.reason, self.address)
        elif what is Control.OPEN and status == KvReceipt.STATUS_OK:
            counters.resumed += transfer.was_open
            transfer.opened(receipt, self._answered_at_s)
        elif what is Control.COMMIT and status == KvReceipt.STATUS_COMMITTED:
            transfer.committed()
        elif isinstance(what, Piece) and status == KvReceipt.STATUS_OK:
            transfer.landed(self._answered_at_s)
        elif isinstance(what, Piece) and status == KvReceipt.STATUS_RESEND:
            transfer.damaged(what)
            counters.chunks_resent += 1
        else:
            name = KvReceipt.Status.Name(status) if status in KvReceipt.Status.values() else status
            raise LinkBrokenError(f"it answered {name} out of turn")

    def _free(self, frame: _Frame) -> None:
        """Its slot and its part of the window."""
        if isinstance(frame.what, Piece) and frame.packed is not None:
            self._lane.free(frame.packed)
            self._leave_window(frame.what)

    # The clock.

    async def _watch_clock(self) -> None:
        """Returns when the link was idle for long enough."""
        tick_s = BEAT_S / 4
        while True:
            slept_at_s = time.monotonic()
            await asyncio.sleep(tick_s)
            now_s = time.monotonic()
            # Late: this process stood still. What came meanwhile is still to be heard.
            late_s = now_s - slept_at_s - tick_s
            self._heard_at_s += late_s
            self._answered_at_s += late_s
            if now_s - self._heard_at_s > SILENCE_S:
                raise LinkBrokenError(f"nothing was heard of it for {SILENCE_S:g} s")
            if self._unanswered and now_s - self._answered_at_s > ANSWER_TIMEOUT_S:
                raise LinkBrokenError(f"it answered no frame for {ANSWER_TIMEOUT_S:g} s")
            for transfer in list(self._transfers):
                if transfer.is_lost(now_s):
                    transfer.fail(lost(self.address, "it did not answer again"))
            is_silent = now_s - self._said_at_s + tick_s > BEAT_S
            if self.is_welcome.is_set() and is_silent and self._outbox.empty():
                self._outbox.put_nowait(KvBeat())
            is_used = self._transfers or self._unanswered or self._window_chunks
            if not is_used and now_s - self._used_at_s > IDLE_S:
                self.is_open = False  # from this moment on nobody takes it
                return

    def _end_transfers(self, error: Exception) -> None:
        now_s = time.monotonic()
        for transfer in list(self._transfers):
            if isinstance(error, HandoffError):
                transfer.link_broke(HandoffError(str(error), decode_lost=error.decode_lost), now_s)
            else:
                transfer.link_broke(LinkBrokenError(str(error)), now_s)


def lost(address: str, why: str) -> HandoffError:
    """The receiver was lost for good."""
    return HandoffError(f"decode worker at {address} was lost: {why}", decode_lost=True)


def _control_frame(transfer: Transfer, control: Control, sequence: int) -> _Frame:
    message = transfer.take_control(control, sequence).SerializeToString()
    return _Frame(sequence, transfer, control, message)


def _reason(tasks: list[asyncio.Task[None]]) -> Exception:
    """Why the link is over."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, LinkBrokenError | HandoffError):
                return error
            _log.error("a KV link failed", exc_info=error)
            return LinkBrokenError(f"{type(error).__name__}: {error}")
    return LinkBrokenError("it was closed")
