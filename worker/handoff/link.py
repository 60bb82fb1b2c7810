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
from legato.protos.internal_access import ANYBODY, InternalAccess
from legato.protos.kv_transfer_pb2 import KvAnswer, KvBeat, KvFrame, KvHello, KvReceipt
from legato.protos.printable import printable
from legato.protos.protocol_version import PROTOCOL_VERSION
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.handoff import lanes
from legato.worker.handoff.frames import MAX_PLAIN_BYTES
from legato.worker.handoff.handoff_error import (
    HandoffError,
    check_own_sockets,
    out_of_reach,
    own_fault,
)
from legato.worker.handoff.lanes import GrpcLane, Lane, MemoryLane
from legato.worker.handoff.outgoing import Frame, NumbersUsedUpError, Outgoing
from legato.worker.handoff.shared_memory import MemoryRefusedError
from legato.worker.handoff.transfer import Control, Piece, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.handoff.retries import Retries
    from legato.worker.handoff.shared_memory import SenderMemory
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.pager import KvPager

    Call = grpc.aio.StreamStreamCall[bytes, bytes]

_log = logging.getLogger(__name__)
_METHOD = "/{}/Link".format(kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name)
BEAT_S = 0.5
SILENCE_S = 2.5
# The receiver lives, but does not get on with what was sent.
ANSWER_TIMEOUT_S = 5.0
IDLE_S = 30.0
# A connection that is refused is so by then; one that is silent, or slow, ends later.
REFUSAL_S = 0.5
# The receiver has understood and does not want: it would not another time either.
_FINAL_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class LinkBrokenError(Exception):
    """The stream is over; its transfers may go on over another one. `unreachable`: there was none,
    for a connection was refused.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(printable(message))
        self.unreachable = unreachable


@dataclass(frozen=True)
class LinkParts:
    """What all links of a worker share."""

    identity: Identity
    kv_wire: str
    row_bytes: int  # on the wire, of one token in one layer
    pager: KvPager
    counters: TransferCounters
    # Slots, and bytes of each. None: rows go inside gRPC's messages alone.
    new_memory: Callable[[int, int], SenderMemory] | None
    access: InternalAccess = ANYBODY


class Link:
    """Runs until it breaks, or has been idle for IDLE_S."""

    def __init__(
        self, address: str, receiver_worker_id: str, parts: LinkParts, retries: Retries
    ) -> None:
        self.address = address
        self.is_open = True
        self.has_broken = False
        self._retries = retries
        self._is_welcome = asyncio.Event()
        self._moved_rows = False
        self._receiver_worker_id = receiver_worker_id
        self._parts = parts
        access = parts.access
        self._channel = access.channel(address, CHANNEL_OPTIONS)
        self._call: Call = self._channel.stream_stream(_METHOD)(metadata=access.metadata)
        self._memory: SenderMemory | None = None
        self._lane: Lane = GrpcLane(parts.row_bytes)
        self._transfers: dict[Transfer, None] = {}
        self._outgoing = Outgoing(parts.pager)
        self._unanswered: deque[Frame] = deque()
        now_s = time.monotonic()
        self._begun_at_s = now_s
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
        self._outgoing.add(transfer)
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
            self._outgoing.add(transfer)

    async def run(self) -> None:
        """The link's life. Cancelling it ends the link at once."""
        tasks = [
            asyncio.create_task(work)
            for work in (self._converse(), self._watch_clock(), self._write())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.is_open = False
            error = _reason(tasks)
            self.has_broken = isinstance(error, LinkBrokenError)
            if self.has_broken:
                self._retries.broke(time.monotonic(), moved_rows=self._moved_rows)
            self._end_transfers(error or LinkBrokenError("it was closed"))
            for task in tasks:
                task.cancel()
            try:
                await self._channel.close()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._outgoing.close()
            finally:  # whoever cancels that
                self._leave_memory()

    def _leave_memory(self) -> None:
        if self._memory is None:
            return
        if self.has_broken:
            self._retries.keep_memory(self._memory)
        else:
            self._memory.close()

    async def _watch_progress(self, transfer: Transfer) -> None:
        while True:
            await transfer.progress.changed()
            self._outgoing.add(transfer)

    async def _watch_confirmed(self, transfer: Transfer) -> None:
        await transfer.progress.confirmed()
        transfer.is_confirmed = True
        self._outgoing.add(transfer)

    # The stream.

    async def _write(self) -> None:
        await self._is_welcome.wait()
        beat = KvFrame(beat=KvBeat()).SerializeToString()
        while self.is_open:
            try:
                frame = await self._outgoing.next()
            except NumbersUsedUpError:
                raise LinkBrokenError("the numbers of its frames are used up") from None
            if frame is None:
                await self._say(beat)
                continue
            if not self._unanswered:
                self._answered_at_s = time.monotonic()
            self._unanswered.append(frame)
            self._outgoing.sent(frame)
            await self._say(frame.message)
            frame.message = b""  # memory for the next one, which is in the caches still
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
        if len(message) > MAX_PLAIN_BYTES:
            raise LinkBrokenError(f"its answer has {len(message)} bytes, limit {MAX_PLAIN_BYTES}")
        try:
            return KvAnswer.FromString(message)
        except DecodeError as error:
            raise LinkBrokenError(f"it answered what is malformed: {error}") from None

    async def _end_of_call(self) -> Exception:
        code, details = await self._call.code(), await self._call.details()
        text = f"it ended the stream: {code.name} {details}"
        if code in _FINAL_CODES:
            text = f"decode worker at {self.address}: {text}"
            return HandoffError(text, decode_lost=True, refused=True)
        if code is not grpc.StatusCode.UNAVAILABLE or self._is_welcome.is_set():
            return LinkBrokenError(text)
        check_own_sockets()
        lived_s = time.monotonic() - self._begun_at_s
        return LinkBrokenError(text, unreachable=lived_s < REFUSAL_S)

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
                refused=True,
            )
        if self._memory is not None:
            if welcome.shared_memory:
                self._lane = MemoryLane(self._memory)
            else:
                why = printable(welcome.memory_refused) or "the receiver gives no reason"
                self._retries.log(
                    logging.INFO,
                    f"KV to {printable(self.address)} goes by gRPC, not by shared memory: {why}",
                )
                self._retries.refuse_memory()
                self._memory.close()
                self._memory = None
        self._is_welcome.set()
        self._outgoing.start(self._lane)
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
        try:
            self._memory = self._retries.take_memory(
                lanes.NUM_SLOTS, max(lanes.SLOT_BYTES, self._parts.row_bytes)
            )
        except MemoryRefusedError as error:
            self._retries.log(
                logging.WARNING, f"KV to {printable(self.address)} goes by gRPC: {error}"
            )
        if self._memory is not None:
            hello.memory.CopyFrom(self._memory.description)
        return hello

    # The receiver's answers.

    def _settle(self, receipt: KvReceipt) -> None:
        if not self._unanswered or self._unanswered[0].sequence != receipt.sequence:
            raise LinkBrokenError(f"it answered frame {receipt.sequence} out of turn")
        frame = self._unanswered.popleft()
        self._answered_at_s = time.monotonic()
        self._outgoing.answered(frame)
        if frame.transfer.has_ended:
            return
        try:
            self._tell(frame, receipt)
        except HandoffError as error:
            frame.transfer.fail(error)
        self._outgoing.add(frame.transfer)

    def _tell(self, frame: Frame, receipt: KvReceipt) -> None:
        transfer, what, counters = frame.transfer, frame.what, self._parts.counters
        status = receipt.status
        if status == KvReceipt.STATUS_REFUSED:
            transfer.refused(receipt.reason, self.address)
        elif what is Control.OPEN and status == KvReceipt.STATUS_OK:
            counters.resumed += transfer.was_open
            transfer.opened(receipt, self._answered_at_s)
        elif what is Control.COMMIT and status == KvReceipt.STATUS_COMMITTED:
            transfer.committed()
            self._moved_rows = True
        elif isinstance(what, Piece) and status == KvReceipt.STATUS_OK:
            transfer.landed(self._answered_at_s)
            self._moved_rows = True
        elif isinstance(what, Piece) and status == KvReceipt.STATUS_RESEND:
            transfer.damaged(what)
            counters.chunks_resent += 1
        else:
            name = KvReceipt.Status.Name(status) if status in KvReceipt.Status.values() else status
            raise LinkBrokenError(f"it answered {name} out of turn")

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
                    transfer.fail(out_of_reach(self.address, "it did not answer again"))
            is_silent = now_s - self._said_at_s + tick_s > BEAT_S
            if is_silent:
                self._outgoing.beat()
            is_used = self._transfers or self._unanswered or not self._outgoing.is_empty
            if not is_used and now_s - self._used_at_s > IDLE_S:
                self.is_open = False  # from this moment on nobody takes it
                return

    def _end_transfers(self, error: Exception) -> None:
        now_s = time.monotonic()
        for transfer in list(self._transfers):
            if isinstance(error, HandoffError):
                own = HandoffError(str(error), decode_lost=error.decode_lost, refused=error.refused)
                transfer.link_broke(own, now_s, unreachable=False)
            else:
                unreachable = isinstance(error, LinkBrokenError) and error.unreachable
                transfer.link_broke(LinkBrokenError(str(error)), now_s, unreachable=unreachable)


def _reason(tasks: list[asyncio.Task[None]]) -> LinkBrokenError | HandoffError | None:
    """Why the link is over; None: this side has ended it."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, LinkBrokenError | HandoffError):
                return error
            if isinstance(error, OSError):
                return own_fault(error)
            _log.error("a KV link failed", exc_info=error)
            return LinkBrokenError(f"{type(error).__name__}: {error}")
    return None
