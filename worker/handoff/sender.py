"""KvSender: sends sequences' KV to the decode workers that granted their tickets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos.internal_access import ANYBODY, InternalAccess
from legato.worker.handoff.handoff_error import HandoffError, out_of_reach, own_fault
from legato.worker.handoff.link import LinkBrokenError, LinkParts
from legato.worker.handoff.links import Links
from legato.worker.handoff.transfer import RowSize, Transfer
from legato.worker.kv.row_range import RowRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.protos import worker_pb2
    from legato.worker.handoff.shared_memory import SenderMemory
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.pager import KvPager
    from legato.worker.kv.progress import KvProgress
    from legato.worker.kv.wire import WireFormat

__all__ = ["HandoffError", "HandoffResult", "KvSender"]


@dataclass(frozen=True)
class HandoffResult:
    """A committed transfer."""

    kv_bytes: int  # on the wire, each row counted once
    transfer_s: float  # from `send` on, the time it waited for rows included
    reused_tokens: int  # the first ones: their KV was there already and was not sent


class KvSender:
    """Used on the event loop; each `send` is one transfer."""

    def __init__(
        self,
        identity: Identity,
        pager: KvPager,
        wire: WireFormat,
        counters: TransferCounters,
        new_memory: Callable[[int, int], SenderMemory] | None = None,
        *,
        access: InternalAccess = ANYBODY,
    ) -> None:
        """`new_memory`: makes slots, of so many bytes each, that receivers on this host may read
        rows from; None: rows go by gRPC alone.
        """
        num_heads = identity.kv_shape.num_kv_heads
        self._size = RowSize(
            num_bytes=wire.num_bytes(RowRange(0, 1, 0, 1, 0, num_heads)),
            num_kv_heads=num_heads,
        )
        self._counters = counters
        self._links = Links(
            LinkParts(
                identity,
                wire.name,
                self._size.num_bytes,
                pager,
                counters,
                new_memory,
                access,
            )
        )
        self._is_closed = False

    async def send(
        self, progress: KvProgress, ticket: worker_pb2.KvTicket, address: str
    ) -> HandoffResult:
        """Sends rows as they become available, and lets the receiver commit when all have landed
        and `progress` is confirmed. Cancelled, it tells the receiver that no more comes.

        Raises:
            HandoffError: the receiver refused; or was lost, and in 5 s not found again, or in 2 s
                not found at all; or this worker can open no link.
        """
        started_at_s = time.perf_counter()
        transfer = Transfer(progress, ticket, self._size)
        self._counters.sending += 1
        completed = False
        try:
            await self._carry(transfer, ticket.worker_id, address)
            completed = True
        finally:
            self._counters.sending -= 1
            if completed:
                self._counters.completed += 1
            else:
                self._counters.failed += 1
        transfer_s = time.perf_counter() - started_at_s
        return HandoffResult(transfer.num_bytes, transfer_s, transfer.reused_tokens)

    async def close(self) -> None:
        """Transfers under way fail."""
        self._is_closed = True
        await self._links.close()

    async def _carry(self, transfer: Transfer, worker_id: str, address: str) -> None:
        why = "no link to it was made"
        while True:
            try:
                link = await self._links.to(address, worker_id, transfer.lost_at_s)
            except OSError as error:
                raise own_fault(error) from None
            if self._is_closed:
                raise HandoffError("this worker ends", decode_lost=False)
            if link is None:
                raise out_of_reach(address, why)
            try:
                return await link.carry(transfer)
            except LinkBrokenError as error:
                why = str(error)
