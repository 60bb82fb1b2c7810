"""IncomingTransfer: the fenced landing of one transfer in its ticket's blocks."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.kernels.crc32c import crc32c
from legato.protos.kv_transfer_pb2 import KvReceipt, KvRows
from legato.worker.handoff.tickets import TicketState
from legato.worker.kv.block_lease import LeaseReleasedError
from legato.worker.kv.pager import DamagedChunkError
from legato.worker.kv.row_range import RowRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from legato.protos.kv_transfer_pb2 import KvClose
    from legato.worker.handoff.landing import LandingRecord
    from legato.worker.handoff.tickets import Ticket, TicketBook
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.kv.pager import KvPager

# More damage than this is not chance: the path or the sender is broken.
MAX_DAMAGED_FRAMES = 16
# A transfer has begun and its prefill worker has not been heard since: then the ticket is void.
# As long as a sender tries to come back.
LEASE_S = 5.0


class RefusedError(Exception):
    """The transfer is over; the message says which field of which message was wrong."""


@dataclass(eq=False)
class Landing:
    """What has landed for one ticket, over all its transfers. It lives with the ticket."""

    sender_worker_id: str
    record: LandingRecord
    transfer: IncomingTransfer | None = None  # the one that may write
    lapse: asyncio.TimerHandle | None = None  # where none may
    num_written: int = 0  # rows of one head, those that came again included
    # On their way to the pages, in that order; those of a transfer that gave way included.
    _writing: list[RowRange] = field(default_factory=list)

    @contextmanager
    def writing(self, rows: RowRange) -> Iterator[None]:
        """Around a write. Rows count from its good end on, and none that another write is still to
        overwrite: what that one brings may be damaged.
        """
        self.record.remove(rows)
        self._writing.append(rows)
        try:
            yield
        except BaseException:
            self._writing.remove(rows)
            raise
        self._writing.remove(rows)
        self.record.add(rows)
        for others in self._writing:
            self.record.remove(others)
        self.num_written += rows.num_layers * rows.num_tokens * rows.num_heads


class IncomingTransfer:
    """From an Open to its Close, its refusal, the end of its stream, or another Open of the ticket.

    Used on the event loop. Nothing is written before everything about a frame has been checked,
    and a write pins the ticket's blocks: between the check and the write the ticket may close, and
    then nothing is written either. What was written before another Open came is in the pages
    before anything of that one is, for the pager keeps the order.
    """

    def __init__(
        self,
        ticket: Ticket,
        landing: Landing,
        tickets: TicketBook,
        pager: KvPager,
        counters: TransferCounters,
        on_commit: Callable[[Ticket], None],
        *,
        num_heads: int,
    ) -> None:
        """Of a ticket that is LANDING, or of one whose KV the same sender brought before."""
        self.ticket = ticket
        self._landing = landing
        self._tickets = tickets
        self._pager = pager
        self._counters = counters
        self._on_commit = on_commit
        self._num_heads = num_heads
        self._lands = ticket.state is TicketState.LANDING
        self._num_damaged = 0
        self._over: str | None = None  # why

    @property
    def wants_rows(self) -> bool:
        """Fewer have been written than there are; some of these more than once, it may be."""
        landing = self._landing
        return landing.num_written < landing.record.num_rows * self._num_heads

    def opened(self) -> KvReceipt:
        """In answer to Open: what need not be sent."""
        receipt = self._receipt(KvReceipt.STATUS_OK)
        receipt.landed_tokens.extend(self._landing.record.landed_tokens())
        receipt.reused_tokens = self._landing.record.num_reused
        return receipt

    async def land(self, header: KvRows, data: memoryview) -> KvReceipt:
        """Rows, of a header that is not damaged; raises RefusedError, and then the transfer is
        over.
        """
        rows = self._check_rows(header)
        seed, expected = header.header_crc32c, self._pager.wire.num_bytes(rows)
        if len(data) != expected:
            if crc32c(data, seed) != header.crc32c:
                return self._damaged(header)
            raise RefusedError(f"rows: data has {len(data)} bytes, such rows have {expected}")
        lease = self.ticket.lease
        assert lease is not None
        try:
            with self._landing.writing(rows):
                await self._pager.write(lease, rows, data, seed, header.crc32c)
        except LeaseReleasedError:
            raise RefusedError("rows: the request ended, its blocks are gone") from None
        except DamagedChunkError:
            return self._damaged(header)
        self._counters.bytes_received += len(data)
        return self._receipt(KvReceipt.STATUS_OK, header)

    def close(self, message: KvClose) -> KvReceipt:
        """Commits or gives up; raises RefusedError where every row was to be there and is not.

        A commit that was answered, and the answer lost, is answered again.
        """
        self._check_current("close", message.attempt)
        if not message.commit:
            self.break_off("the sender has given it up")
            return self._receipt(KvReceipt.STATUS_OK)
        record = self._landing.record
        missing = record.first_missing()
        if missing is not None:
            raise RefusedError(
                f"close: the row of layer {missing[0]}, token {missing[1]} has not landed"
            )
        if message.num_rows != record.num_rows:
            raise RefusedError(
                f"close: num_rows is {message.num_rows}, {record.num_rows} have landed"
            )
        if self._lands:
            self._tickets.finish_landing(self.ticket)
            self._counters.completed += 1
            self._on_commit(self.ticket)
        self._over = "the transfer has committed"
        return self._receipt(KvReceipt.STATUS_COMMITTED)

    def break_off(self, why: str, lease_s: float = LEASE_S) -> None:
        """It has failed, if it is not over; nothing is freed. Another Open may come for `lease_s`:
        then the ticket is void.
        """
        if self._over is not None:
            return
        self._over = why
        if not self._lands:
            return
        self._counters.failed += 1
        self._tickets.break_landing(self.ticket)
        landing = self._landing
        landing.transfer = None
        if self.ticket.state is TicketState.RESERVED:
            loop = asyncio.get_running_loop()
            landing.lapse = loop.call_later(max(0.0, lease_s), self._lapse)

    def give_way(self) -> None:
        """Another Open of the ticket has come."""
        self._over = "a later Open has taken the transfer over"

    def _lapse(self) -> None:
        if self.ticket.state is TicketState.RESERVED:
            self._tickets.close(
                self.ticket,
                f"no KV came for {LEASE_S:g} s from {self._landing.sender_worker_id}, which had "
                f"begun to send it",
            )

    def _check_rows(self, header: KvRows) -> RowRange:
        self._check_current("rows", header.attempt)
        if not self._lands:
            raise RefusedError("rows: the KV is complete")
        rows = row_range(header)
        record = self._landing.record
        if rows is None or rows.layer_end > record.num_layers:
            raise RefusedError(
                f"rows: {header.num_layers} layers from {header.layer_start} on, "
                f"limit [0, {record.num_layers})"
            )
        # Below num_reused are the blocks that were found: others may read them.
        if rows.token_start < record.num_reused or rows.token_end > record.num_tokens:
            raise RefusedError(
                f"rows: tokens {rows.token_start} to {rows.token_end} are not within "
                f"[{record.num_reused}, {record.num_tokens})"
            )
        if rows.head_start + rows.num_heads > self._num_heads:
            raise RefusedError(
                f"rows: {rows.num_heads} KV heads from {rows.head_start} on, "
                f"limit [0, {self._num_heads})"
            )
        return rows

    def _check_current(self, message: str, attempt: int) -> None:
        """Raises RefusedError unless this is the ticket's transfer, and not over."""
        if self._over is not None:
            raise RefusedError(f"{message}: {self._over}")
        if self._lands and self.ticket.state is TicketState.CLOSED:
            raise RefusedError(f"{message}: the ticket is closed")
        if attempt != self.ticket.key.attempt:
            raise RefusedError(
                f"{message}: attempt is {attempt}, the ticket's is {self.ticket.key.attempt}"
            )

    def _damaged(self, header: KvRows) -> KvReceipt:
        self._counters.chunks_refused += 1
        self._num_damaged += 1
        if self._num_damaged > MAX_DAMAGED_FRAMES:
            raise RefusedError(
                f"rows: {self._num_damaged} frames of this transfer were damaged, "
                f"at most {MAX_DAMAGED_FRAMES} are sent again"
            )
        return self._receipt(KvReceipt.STATUS_RESEND, header)

    def _receipt(
        self, status: KvReceipt.Status.ValueType, header: KvRows | None = None
    ) -> KvReceipt:
        receipt = KvReceipt(epoch=self.ticket.epoch, attempt=self.ticket.key.attempt, status=status)
        if header is not None:
            name_rows(receipt, header)
        return receipt


def name_rows(receipt: KvReceipt, header: KvRows) -> None:
    """Writes into an answer to Rows which they were."""
    receipt.layer_start = header.layer_start
    receipt.token_start = header.token_start
    receipt.kv_head_start = header.kv_head_start


def row_range(header: KvRows) -> RowRange | None:
    """The rows that a header names; None where they are none, whatever the model is like."""
    starts = (header.layer_start, header.token_start, header.kv_head_start)
    counts = (header.num_layers, header.num_tokens, header.num_kv_heads)
    if min(starts) < 0 or min(counts) < 1:
        return None
    return RowRange(
        layer_start=header.layer_start,
        num_layers=header.num_layers,
        token_start=header.token_start,
        num_tokens=header.num_tokens,
        head_start=header.kv_head_start,
        num_heads=header.num_kv_heads,
    )
