"""TicketBook: the decode worker's promises of KV blocks, and what has become of each."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import blocks_for

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool


class NoRoomNowError(Exception):
    """Too few free blocks at present."""


class NeverFitsError(Exception):
    """More blocks than the pool has."""


class TicketState(Enum):
    """Where a ticket stands."""

    RESERVED = auto()  # a credit; no block is bound, or those of a broken transfer are
    LANDING = auto()  # blocks are bound and one transfer writes into them
    LANDED = auto()  # every row is there
    DECODING = auto()  # the blocks belong to the engine's sequence
    CLOSED = auto()  # void: the epoch will never be valid again

    def can_become(self, target: TicketState) -> bool:
        """Whether `target` may follow."""
        return target in _NEXT[self]


_NEXT = {
    TicketState.RESERVED: {TicketState.LANDING, TicketState.CLOSED},
    TicketState.LANDING: {TicketState.LANDED, TicketState.RESERVED, TicketState.CLOSED},
    TicketState.LANDED: {TicketState.DECODING, TicketState.CLOSED},
    TicketState.DECODING: {TicketState.CLOSED},
    TicketState.CLOSED: set[TicketState](),
}


@dataclass(frozen=True)
class AttemptKey:
    """One try at a request."""

    request_id: str
    attempt: int


@dataclass(eq=False)
class Ticket:
    """Changed by the TicketBook only."""

    key: AttemptKey
    epoch: int
    num_handoff_tokens: int
    max_kv_tokens: int
    num_blocks: int
    state: TicketState = TicketState.RESERVED
    lease: BlockLease | None = None
    # Set when the state is LANDED or CLOSED: what the Decode call waits for.
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def move_to(self, target: TicketState) -> None:
        """Changes the state."""
        assert self.state.can_become(target), f"{self.state} cannot become {target}"
        self.state = target
        if target in (TicketState.LANDED, TicketState.CLOSED):
            self.settled.set()


class TicketBook:
    """Used on the event loop only.

    A ticket is a credit until its KV begins to arrive; only then are blocks bound. Epochs start
    at an unpredictable number and are never used twice in a process, so that a chunk from an
    earlier ticket, or from a sender that talks to a restarted worker, matches none. Two tickets
    may carry the same key: a request that is sent again right after its cancel overlaps with its
    old self for a moment, and the epochs keep the two apart.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._next_epoch = secrets.randbits(62) + 1  # below 2^63: room to count on in a uint64
        self._by_epoch: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._by_epoch)

    @property
    def num_landing(self) -> int:
        """Tickets whose KV is arriving."""
        return sum(t.state is TicketState.LANDING for t in self._by_epoch.values())

    def reserve(self, key: AttemptKey, num_handoff_tokens: int, max_kv_tokens: int) -> Ticket:
        """Promises room for `max_kv_tokens` rows.

        Raises:
            NeverFitsError, NoRoomNowError: and nothing is promised.
        """
        if not 1 <= num_handoff_tokens <= max_kv_tokens:
            raise ValueError(
                f"num_handoff_tokens must be in [1, max_kv_tokens {max_kv_tokens}], "
                f"got {num_handoff_tokens}"
            )
        num_blocks = blocks_for(max_kv_tokens, self._block_size)
        if num_blocks > self._pool.total:
            raise NeverFitsError(
                f"max_kv_tokens {max_kv_tokens} needs {num_blocks} blocks of {self._block_size} "
                f"tokens; this worker has {self._pool.total} in all"
            )
        if not self._pool.reserve(num_blocks):
            raise NoRoomNowError(
                f"max_kv_tokens {max_kv_tokens} needs {num_blocks} blocks; "
                f"{self._pool.usage().available} are free"
            )
        ticket = Ticket(key, self._next_epoch, num_handoff_tokens, max_kv_tokens, num_blocks)
        self._next_epoch += 1
        self._by_epoch[ticket.epoch] = ticket
        return ticket

    def find(self, epoch: int) -> Ticket | None:
        """The open ticket of that epoch."""
        return self._by_epoch.get(epoch)

    def begin_landing(self, ticket: Ticket) -> BlockLease:
        """A transfer begins: turns the credit into blocks, once."""
        ticket.move_to(TicketState.LANDING)
        if ticket.lease is None:
            ticket.lease = BlockLease(self._pool, self._pool.allocate_reserved(ticket.num_blocks))
        return ticket.lease

    def break_landing(self, ticket: Ticket) -> None:
        """The transfer ended early: the blocks stay with the ticket, which waits for another."""
        if ticket.state is TicketState.LANDING:
            ticket.move_to(TicketState.RESERVED)

    def finish_landing(self, ticket: Ticket) -> None:
        """Every row of every layer is in its page."""
        ticket.move_to(TicketState.LANDED)

    def hand_over(self, ticket: Ticket) -> BlockLease:
        """Gives the blocks to the engine's sequence, which releases them from now on."""
        ticket.move_to(TicketState.DECODING)
        assert ticket.lease is not None
        return ticket.lease

    def close(self, ticket: Ticket) -> None:
        """Voids the epoch and gives back what the ticket still owns. Idempotent."""
        if ticket.state is TicketState.CLOSED:
            return
        handed_over = ticket.state is TicketState.DECODING
        ticket.move_to(TicketState.CLOSED)
        del self._by_epoch[ticket.epoch]
        if ticket.lease is None:
            self._pool.unreserve(ticket.num_blocks)
        elif not handed_over:
            ticket.lease.release()

    def close_all(self) -> None:
        """Voids every ticket: the worker ends."""
        for ticket in list(self._by_epoch.values()):
            self.close(ticket)
