"""KvReceiver: who may hand KV over to this worker, and into which ticket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.handoff.incoming import IncomingTransfer, Landing, RefusedError
from legato.worker.handoff.landing import LandingRecord
from legato.worker.handoff.tickets import AttemptKey, TicketState

if TYPE_CHECKING:
    from legato.protos.kv_transfer_pb2 import KvHello, KvOpen
    from legato.worker.handoff.tickets import Ticket, TicketBook
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.identity import Identity
    from legato.worker.kv.pager import KvPager


class KvReceiver:
    """One for a worker, shared by its links. Used on the event loop only."""

    def __init__(
        self,
        identity: Identity,
        tickets: TicketBook,
        pager: KvPager,
        counters: TransferCounters,
    ) -> None:
        self.worker_id = identity.worker_id
        self.wire = pager.wire
        self.counters = counters
        self._identity = identity
        self._tickets = tickets
        self._pager = pager

    def check(self, hello: KvHello) -> None:
        """Raises RefusedError naming the first field that does not fit."""
        mismatch = self._identity.mismatch(hello, self.wire.name)
        if mismatch is not None:
            raise RefusedError(f"hello: {mismatch}")

    def open(self, message: KvOpen, sender_worker_id: str) -> IncomingTransfer:
        """A transfer into the ticket's blocks, which goes on from what has landed of that sender.

        An earlier one of the ticket gives way. What another sender brought does not count: a
        sequence's rows are all of one worker.

        Raises:
            RefusedError: the ticket is not open, is another's, or has its KV otherwise.
        """
        ticket = self._ticket_of(message)
        landing = ticket.landing
        known = landing is not None and landing.sender_worker_id == sender_worker_id
        if ticket.state not in (TicketState.RESERVED, TicketState.LANDING) and not known:
            raise RefusedError(f"open: the ticket is {ticket.state.name}, its KV is there")
        if ticket.state is TicketState.RESERVED:
            self._tickets.begin_landing(ticket)
        if landing is not None:
            if landing.transfer is not None:
                landing.transfer.give_way()
            if landing.lapse is not None:
                landing.lapse.cancel()
        shape = self._identity.kv_shape
        if landing is None or not known:
            record = LandingRecord(
                shape.num_layers,
                shape.num_kv_heads,
                ticket.num_reused_tokens,
                ticket.num_handoff_tokens,
            )
            landing = ticket.landing = Landing(sender_worker_id, record)
        landing.transfer = IncomingTransfer(
            ticket,
            landing,
            self._tickets,
            self._pager,
            self.counters,
            num_heads=shape.num_kv_heads,
        )
        return landing.transfer

    def _ticket_of(self, message: KvOpen) -> Ticket:
        wanted = message.ticket
        if wanted.worker_id != self.worker_id:
            raise RefusedError(
                f"open: ticket.worker_id is {wanted.worker_id!r}, this worker is {self.worker_id!r}"
            )
        ticket = self._tickets.find(wanted.epoch)
        if ticket is None:
            raise RefusedError(f"open: ticket.epoch {wanted.epoch} is not open on this worker")
        key = AttemptKey(wanted.key.request_id, wanted.key.attempt)
        if key != ticket.key:
            raise RefusedError(f"open: ticket.key is {key}, the epoch's is {ticket.key}")
        if message.num_tokens != ticket.num_handoff_tokens:
            raise RefusedError(
                f"open: num_tokens is {message.num_tokens}, "
                f"the ticket is for {ticket.num_handoff_tokens}"
            )
        return ticket
