"""SessionTransfers: the transfers of one stream, and what the receiver says to their frames."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from legato.protos.kv_transfer_pb2 import KvReceipt
from legato.worker.handoff.frames import header_checksum
from legato.worker.handoff.incoming import RefusedError, name_rows
from legato.worker.handoff.tickets import TicketState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from legato.protos.kv_transfer_pb2 import KvClose, KvOpen, KvRows
    from legato.worker.handoff.incoming import IncomingTransfer
    from legato.worker.handoff.receiver import KvReceiver

MAX_REASON_CHARS = 500  # some of it may be what the sender sent


class SessionTransfers:
    """A frame belongs to the transfer that was open in the moment in which it came. A refusal ends
    one transfer, and no other.
    """

    def __init__(self, receiver: KvReceiver) -> None:
        self.sender_worker_id = ""  # by its Hello
        # Frames in a row by which no row landed that was still to come, and nothing was committed.
        self.num_vain_frames = 0
        self._receiver = receiver
        self._open: dict[int, IncomingTransfer] = {}  # by epoch, up to their Close
        self._live: set[IncomingTransfer] = set()  # up to the Close's answer

    def open(self, message: KvOpen) -> KvReceipt:
        """The answer to an Open."""
        ticket = message.ticket
        try:
            transfer = self._receiver.open(message, self.sender_worker_id)
        except RefusedError as error:
            return _refusal(ticket.epoch, ticket.key.attempt, error)
        self._open[ticket.epoch] = transfer
        self._live.add(transfer)
        return transfer.opened()

    def landing(self, header: KvRows, data: memoryview | None) -> Coroutine[Any, Any, KvReceipt]:
        """Of rows that came now; None: there are none where it says."""
        return self._land(self._open.get(header.epoch), header, data)

    def closing(self, message: KvClose) -> Callable[[], KvReceipt]:
        """Of a Close that came now: what follows is not of its transfer."""
        return partial(self._close, message, self._open.pop(message.epoch, None))

    def break_off(self, why: str, lease_s: float) -> None:
        """The stream is over: see `IncomingTransfer.break_off`."""
        for transfer in self._live:
            transfer.break_off(why, lease_s)

    async def _land(
        self, transfer: IncomingTransfer | None, header: KvRows, data: memoryview | None
    ) -> KvReceipt:
        if data is None or header_checksum(header) != header.header_crc32c:
            # Nothing that it says counts: it cannot be told whose they are.
            self._receiver.counters.chunks_refused += 1
            receipt = KvReceipt(
                epoch=header.epoch, attempt=header.attempt, status=KvReceipt.STATUS_RESEND
            )
            name_rows(receipt, header)
            return receipt
        try:
            if transfer is None:
                raise RefusedError(f"rows: no transfer of epoch {header.epoch} is open here")
            is_wanted = transfer.wants_rows
            receipt = await transfer.land(header, data)
            if is_wanted and receipt.status == KvReceipt.STATUS_OK:
                self.num_vain_frames = 0
            return receipt
        except RefusedError as error:
            self._receiver.counters.chunks_refused += 1
            receipt = _refusal(header.epoch, header.attempt, error)
            name_rows(receipt, header)
            self._end(transfer, error)
            return receipt

    def _close(self, message: KvClose, transfer: IncomingTransfer | None) -> KvReceipt:
        try:
            if transfer is None:
                raise RefusedError(f"close: no transfer of epoch {message.epoch} is open here")
            was_landing = transfer.ticket.state is TicketState.LANDING
            receipt = transfer.close(message)
        except RefusedError as error:
            self._end(transfer, error)
            return _refusal(message.epoch, message.attempt, error)
        self._live.discard(transfer)
        if message.commit and was_landing:
            self.num_vain_frames = 0
        return receipt

    def _end(self, transfer: IncomingTransfer | None, error: RefusedError) -> None:
        if transfer is None:
            return
        transfer.break_off(str(error))
        self._live.discard(transfer)
        epoch = transfer.ticket.epoch
        if self._open.get(epoch) is transfer:
            del self._open[epoch]


def _refusal(epoch: int, attempt: int, error: RefusedError) -> KvReceipt:
    return KvReceipt(
        epoch=epoch,
        attempt=attempt,
        status=KvReceipt.STATUS_REFUSED,
        reason=str(error)[:MAX_REASON_CHARS],
    )
