"""KvReceiver: the fenced landing of a transfer in a ticket's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import kv_transfer_pb2
from legato.worker.handoff.landing import LandingRecord
from legato.worker.handoff.tickets import AttemptKey, TicketState
from legato.worker.kv.block_lease import LeaseReleasedError
from legato.worker.kv.pager import DamagedChunkError
from legato.worker.kv.row_range import RowRange

if TYPE_CHECKING:
    from legato.worker.handoff.tickets import Ticket, TicketBook
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.pager import KvPager

Ack = kv_transfer_pb2.KvAck
# More damage than this is not chance: the path or the sender is broken.
MAX_DAMAGED_CHUNKS = 16


class RefusedError(Exception):
    """The transfer is over; the message says which field of which message was wrong."""


class KvReceiver:
    """Lands one transfer: one per Push stream, used by one task on the event loop.

    Nothing is written before everything about a chunk has been checked, and a write pins the
    ticket's blocks: between the check and the write the ticket may close, and then nothing is
    written either.
    """

    def __init__(
        self,
        identity: Identity,
        tickets: TicketBook,
        pager: KvPager,
        counters: TransferCounters,
    ) -> None:
        self._identity = identity
        self._tickets = tickets
        self._pager = pager
        self._counters = counters
        self._ticket: Ticket | None = None
        self._lease: BlockLease | None = None
        self._record: LandingRecord | None = None
        heads = identity.kv_shape.num_kv_heads
        self._row_bytes = pager.wire.num_bytes(RowRange(0, 1, 0, 1, 0, heads))
        self._num_damaged = 0
        self._committed = False

    async def handle(self, push: kv_transfer_pb2.KvPush) -> Ack:
        """Answers one message. After REFUSED or COMMITTED the stream is over."""
        try:
            match push.WhichOneof("message"):
                case "begin":
                    return self._begin(push.begin)
                case "chunk":
                    return await self._land(push.chunk)
                case "commit":
                    return self._commit(push.commit)
                case _:
                    raise RefusedError("message is empty: begin, chunk or commit is expected")
        except RefusedError as error:
            return self._ack(Ack.STATUS_REFUSED, reason=str(error))

    def close(self) -> None:
        """The stream has ended. Without a commit the transfer has failed; nothing is freed."""
        if self._ticket is None or self._committed:
            return
        self._counters.failed += 1
        self._tickets.break_landing(self._ticket)
        self._ticket = None

    def _begin(self, begin: kv_transfer_pb2.KvBegin) -> Ack:
        if self._ticket is not None:
            raise RefusedError("begin: the transfer has begun already")
        mismatch = self._identity.mismatch(
            begin.model_fingerprint, begin.weights, begin.layout, begin.protocol_version
        )
        if mismatch is not None:
            raise RefusedError(f"begin: {mismatch}")
        wanted = begin.ticket
        if wanted.worker_id != self._identity.worker_id:
            raise RefusedError(
                f"begin: ticket.worker_id is {wanted.worker_id!r}, "
                f"this worker is {self._identity.worker_id!r}"
            )
        ticket = self._tickets.find(wanted.epoch)
        if ticket is None:
            raise RefusedError(f"begin: ticket.epoch {wanted.epoch} is not open on this worker")
        key = AttemptKey(wanted.key.request_id, wanted.key.attempt)
        if key != ticket.key:
            raise RefusedError(f"begin: ticket.key is {key}, the epoch's is {ticket.key}")
        if begin.num_tokens != ticket.num_handoff_tokens:
            raise RefusedError(
                f"begin: num_tokens is {begin.num_tokens}, "
                f"the ticket is for {ticket.num_handoff_tokens}"
            )
        if ticket.state is not TicketState.RESERVED:
            raise RefusedError(f"begin: the ticket is {ticket.state.name}, a transfer came before")
        self._lease = self._tickets.begin_landing(ticket)
        self._record = LandingRecord(
            self._identity.kv_shape.num_layers, ticket.num_reused_tokens, begin.num_tokens
        )
        self._ticket = ticket
        ack = self._ack(Ack.STATUS_OK)
        ack.reused_tokens = ticket.num_reused_tokens
        return ack

    async def _land(self, chunk: kv_transfer_pb2.KvChunk) -> Ack:
        try:
            lease, record = self._check_chunk(chunk)
            where = (chunk.layer, chunk.token_start, chunk.num_tokens)
            # A chunk that has landed came twice: it is acknowledged again and not written again.
            if not record.has(*where):
                heads = self._identity.kv_shape.num_kv_heads
                rows = RowRange(chunk.layer, 1, chunk.token_start, chunk.num_tokens, 0, heads)
                await self._pager.write(lease, rows, memoryview(chunk.data), 0, chunk.crc32c)
                self._counters.bytes_received += len(chunk.data)
                record.add(*where)
        except RefusedError:
            self._counters.chunks_refused += 1
            raise
        except LeaseReleasedError:
            self._counters.chunks_refused += 1
            raise RefusedError("chunk: the request ended, its blocks are gone") from None
        except DamagedChunkError:
            self._counters.chunks_refused += 1
            self._num_damaged += 1
            if self._num_damaged > MAX_DAMAGED_CHUNKS:
                raise RefusedError(
                    f"chunk: {self._num_damaged} of this transfer were damaged, "
                    f"at most {MAX_DAMAGED_CHUNKS} are sent again"
                ) from None
            return self._ack(Ack.STATUS_RESEND, chunk)
        return self._ack(Ack.STATUS_OK, chunk)

    def _check_chunk(self, chunk: kv_transfer_pb2.KvChunk) -> tuple[BlockLease, LandingRecord]:
        ticket = self._open_ticket("chunk", chunk.epoch)
        if chunk.attempt != ticket.key.attempt:
            raise RefusedError(
                f"chunk: attempt is {chunk.attempt}, the ticket's is {ticket.key.attempt}"
            )
        num_layers = self._identity.kv_shape.num_layers
        if not 0 <= chunk.layer < num_layers:
            raise RefusedError(f"chunk: layer is {chunk.layer}, limit [0, {num_layers})")
        # Below that are the blocks that were found: others may read them.
        first = ticket.num_reused_tokens
        end = chunk.token_start + chunk.num_tokens
        if chunk.token_start < first or chunk.num_tokens < 1 or end > ticket.num_handoff_tokens:
            raise RefusedError(
                f"chunk: tokens {chunk.token_start} to {end} are not within "
                f"[{first}, {ticket.num_handoff_tokens})"
            )
        expected = chunk.num_tokens * self._row_bytes
        if len(chunk.data) != expected:
            raise RefusedError(
                f"chunk: data has {len(chunk.data)} bytes, "
                f"{chunk.num_tokens} tokens have {expected}"
            )
        assert self._lease is not None
        assert self._record is not None
        return self._lease, self._record

    def _commit(self, commit: kv_transfer_pb2.KvCommit) -> Ack:
        ticket = self._open_ticket("commit", commit.epoch)
        assert self._record is not None
        missing = self._record.first_missing()
        if missing is not None:
            raise RefusedError(
                f"commit: the row of layer {missing[0]}, token {missing[1]} has not landed"
            )
        if commit.num_bytes != self._bytes_landed:
            raise RefusedError(
                f"commit: num_bytes is {commit.num_bytes}, {self._bytes_landed} bytes landed"
            )
        self._tickets.finish_landing(ticket)
        self._committed = True
        self._counters.completed += 1
        return self._ack(Ack.STATUS_COMMITTED)

    def _open_ticket(self, message: str, epoch: int) -> Ticket:
        """The ticket of this stream, if `epoch` is its own and it is still landing."""
        if self._ticket is None:
            raise RefusedError(f"{message}: no transfer has begun on this stream")
        if epoch != self._ticket.epoch:
            raise RefusedError(f"{message}: epoch is {epoch}, the ticket's is {self._ticket.epoch}")
        if self._ticket.state is not TicketState.LANDING:
            raise RefusedError(f"{message}: the ticket is {self._ticket.state.name}")
        return self._ticket

    @property
    def _bytes_landed(self) -> int:
        return 0 if self._record is None else self._record.num_landed * self._row_bytes

    def _ack(
        self,
        status: kv_transfer_pb2.KvAck.Status.ValueType,
        chunk: kv_transfer_pb2.KvChunk | None = None,
        reason: str = "",
    ) -> Ack:
        return Ack(
            status=status,
            layer=chunk.layer if chunk is not None else 0,
            token_start=chunk.token_start if chunk is not None else 0,
            reason=reason,
            bytes_landed=self._bytes_landed,
        )
