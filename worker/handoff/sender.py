"""KvSender: sends one sequence's KV to the decode worker that granted its ticket."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from legato.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from legato.worker.identity import PROTOCOL_VERSION
from legato.worker.kv import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from typing import TypeVar

    from legato.protos import worker_pb2
    from legato.worker.handoff.peers import PeerChannels
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.pager import KvPager
    from legato.worker.kv.progress import KvProgress

    T = TypeVar("T")
    PushCall = grpc.aio.StreamStreamCall[kv_transfer_pb2.KvPush, kv_transfer_pb2.KvAck]

Ack = kv_transfer_pb2.KvAck
# What may be on the way without an answer: bounds the memory of both sides.
WINDOW_BYTES = 8 << 20
WINDOW_CHUNKS = 64
PROGRESS_TIMEOUT_S = 5.0
MAX_SENDS_PER_CHUNK = 4


class HandoffError(Exception):
    """The KV did not arrive; the message says why.

    `decode_lost`: the decode side refused it or was lost, and another one may take it.
    """

    def __init__(self, message: str, *, decode_lost: bool = True) -> None:
        super().__init__(message)
        self.decode_lost = decode_lost


@dataclass(frozen=True)
class HandoffResult:
    """A committed transfer."""

    kv_bytes: int
    transfer_s: float
    reused_tokens: int  # the first ones: their KV was there already and was not sent


@dataclass(frozen=True)
class _Piece:
    layer: int
    token_start: int
    num_tokens: int


class KvSender:
    """Used on the event loop; each `send` is one transfer."""

    def __init__(
        self, identity: Identity, pager: KvPager, peers: PeerChannels, counters: TransferCounters
    ) -> None:
        self._identity = identity
        self._pager = pager
        self._peers = peers
        self._counters = counters

    async def send(
        self, progress: KvProgress, ticket: worker_pb2.KvTicket, address: str
    ) -> HandoffResult:
        """Returns when the receiver has committed.

        Raises:
            HandoffError: the receiver refused, was lost, or answered nothing for 5 s.
        """
        while progress.lease is None or progress.available(0) < progress.num_tokens:
            await progress.changed()
        await progress.confirmed()
        lease, num_tokens = progress.lease, progress.num_tokens
        started_at_s = time.perf_counter()
        self._counters.sending += 1
        completed = False
        try:
            async with self._peers.use(address) as channel:
                call: PushCall = kv_transfer_pb2_grpc.KvTransferStub(channel).Push()
                try:
                    transfer = _Transfer(self._identity, self._pager, self._counters, call)
                    kv_bytes, reused_tokens = await transfer.run(lease, num_tokens, ticket)
                    completed = True
                finally:
                    call.cancel()  # nothing to the call that is over
        except grpc.aio.AioRpcError as error:
            raise HandoffError(
                f"decode worker at {address}: {error.code().name} {error.details()}"
            ) from None
        finally:
            self._counters.sending -= 1
            if completed:
                self._counters.completed += 1
            else:
                self._counters.failed += 1
        return HandoffResult(kv_bytes, time.perf_counter() - started_at_s, reused_tokens)


class _Transfer:
    """Begin, then chunks with at most a window of them unanswered, then Commit."""

    def __init__(
        self, identity: Identity, pager: KvPager, counters: TransferCounters, call: PushCall
    ) -> None:
        self._identity = identity
        self._pager = pager
        self._counters = counters
        self._call = call
        self._waiting: deque[_Piece] = deque()
        self._unanswered: dict[tuple[int, int], _Piece] = {}
        self._sends: dict[_Piece, int] = {}

    async def run(
        self, lease: BlockLease, num_tokens: int, ticket: worker_pb2.KvTicket
    ) -> tuple[int, int]:
        """Returns the bytes sent, each row counted once, and how many first tokens were not."""
        shape = self._identity.kv_shape
        row_bytes = wire.row_bytes(shape)
        await self._write(
            kv_transfer_pb2.KvPush(
                begin=kv_transfer_pb2.KvBegin(
                    ticket=ticket,
                    model_fingerprint=self._identity.model_fingerprint,
                    layout=self._identity.kv_layout(),
                    protocol_version=PROTOCOL_VERSION,
                    num_tokens=num_tokens,
                    weights=self._identity.weights,
                )
            )
        )
        reused = (await self._read(Ack.STATUS_OK)).reused_tokens
        if not 0 <= reused <= num_tokens:
            raise HandoffError(
                f"the receiver's reused_tokens is {reused}, limit [0, {num_tokens}] (of the tokens)"
            )

        step = wire.tokens_per_chunk(shape)
        self._waiting.extend(
            _Piece(layer, start, min(step, num_tokens - start))
            for layer in range(shape.num_layers)
            for start in range(reused, num_tokens, step)
        )
        unanswered_bytes = 0
        while self._waiting or self._unanswered:
            while (
                self._waiting
                and unanswered_bytes < WINDOW_BYTES
                and len(self._unanswered) < WINDOW_CHUNKS
            ):
                piece = self._waiting.popleft()
                unanswered_bytes += piece.num_tokens * row_bytes
                await self._send_chunk(lease, piece, ticket)
            piece = await self._take_answer()
            unanswered_bytes -= piece.num_tokens * row_bytes

        num_bytes = (num_tokens - reused) * shape.num_layers * row_bytes
        await self._write(
            kv_transfer_pb2.KvPush(
                commit=kv_transfer_pb2.KvCommit(epoch=ticket.epoch, num_bytes=num_bytes)
            )
        )
        await self._read(Ack.STATUS_COMMITTED)
        return num_bytes, reused

    async def _send_chunk(
        self, lease: BlockLease, piece: _Piece, ticket: worker_pb2.KvTicket
    ) -> None:
        self._sends[piece] = self._sends.get(piece, 0) + 1
        if self._sends[piece] > MAX_SENDS_PER_CHUNK:
            raise HandoffError(
                f"layer {piece.layer}, token {piece.token_start} arrived damaged "
                f"{MAX_SENDS_PER_CHUNK} times"
            )
        data, crc = await self._pager.read(lease, piece.layer, piece.token_start, piece.num_tokens)
        self._unanswered[piece.layer, piece.token_start] = piece
        await self._write(
            kv_transfer_pb2.KvPush(
                chunk=kv_transfer_pb2.KvChunk(
                    epoch=ticket.epoch,
                    attempt=ticket.key.attempt,
                    layer=piece.layer,
                    token_start=piece.token_start,
                    num_tokens=piece.num_tokens,
                    data=data,
                    crc32c=crc,
                )
            )
        )
        self._counters.bytes_sent += len(data)

    async def _take_answer(self) -> _Piece:
        """One answered piece; a damaged one goes back into the queue."""
        ack = await self._read(Ack.STATUS_OK, Ack.STATUS_RESEND)
        piece = self._unanswered.pop((ack.layer, ack.token_start), None)
        if piece is None:
            raise HandoffError(
                f"the receiver answered layer {ack.layer}, token {ack.token_start}, "
                f"which was not under way"
            )
        if ack.status == Ack.STATUS_RESEND:
            self._waiting.append(piece)
        return piece

    async def _write(self, push: kv_transfer_pb2.KvPush) -> None:
        try:
            await self._bounded(self._call.write(push), "took no data")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The receiver ended the stream; the refusal that says why may be still unread.
            while True:
                await self._read(Ack.STATUS_OK, Ack.STATUS_RESEND)

    async def _read(self, *wanted: kv_transfer_pb2.KvAck.Status.ValueType) -> kv_transfer_pb2.KvAck:
        ack = await self._bounded(self._call.read(), "answered nothing")
        if isinstance(ack, kv_transfer_pb2.KvAck):
            if ack.status in wanted:
                return ack
            if ack.status == Ack.STATUS_REFUSED:
                raise HandoffError(f"the receiver refused: {ack.reason}")
            raise HandoffError(f"the receiver answered {Ack.Status.Name(ack.status)} out of turn")
        # The end of the stream, before the commit.
        code = await self._bounded(self._call.code(), "ended the stream without a status")
        raise HandoffError(
            f"the receiver ended the stream: {code.name} {await self._call.details()}"
        )

    async def _bounded(self, step: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_S):
                return await step
        except TimeoutError:
            raise HandoffError(f"the receiver {what} for {PROGRESS_TIMEOUT_S:g} s") from None
