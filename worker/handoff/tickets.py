"""TicketBook: the decode worker's promises of KV blocks, and what has become of each."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.worker.handoff.wanted_room import WantedRoom
from legato.worker.kv.block_lease import BlockLease
from legato.worker.priority import Priority
from legato.worker.scheduling.claim import NoRoomNowError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.worker.handoff.incoming import Landing
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.scheduling.capacity import CapacityLedger
    from legato.worker.scheduling.claim import Claim, Newcomer


class TicketState(Enum):
    """Where a ticket stands."""

    RESERVED = auto()  # a credit; no block is bound, or those of a broken transfer are
    LANDING = auto()  # blocks are bound and a transfer writes into them
    LANDED = auto()  # every row is there
    DECODING = auto()  # the blocks belong to the engine's sequences
    CLOSED = auto()  # void: the epoch will never be valid again

    def can_become(self, target: TicketState) -> bool:
        """Whether `target` may follow."""
        return target in _NEXT[self]


_NEXT = {
    TicketState.RESERVED: {TicketState.LANDING, TicketState.DECODING, TicketState.CLOSED},
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


@dataclass(frozen=True)
class TicketRequest:
    """What a ticket is asked for."""

    newcomer: Newcomer
    arrival: int  # the lesser came first to the router
    token_ids: SequenceOf[int]  # one for each row of KV that the hand-off brings
    block_hashes: SequenceOf[bytes] = ()  # of their full blocks; () where none are to be shared

    def __post_init__(self) -> None:
        if len(self.token_ids) != self.newcomer.rows:
            raise ValueError(
                f"token_ids has {len(self.token_ids)} ids, newcomer.rows is {self.newcomer.rows}"
            )


@dataclass(frozen=True)
class LandedAnswer:
    """What one answer goes on with."""

    claim: Claim
    lease: BlockLease
    # The block whose rows are to be copied to the first of its own before it goes on; the
    # reference to it goes with it (see `CapacityScheduler.fork`).
    source: int | None


@dataclass(eq=False)
class Ticket:
    """One Decode call. Changed by the TicketBook only, but for what has landed."""

    key: AttemptKey
    epoch: int
    request: TicketRequest
    # Of the answers that go on. They are alike but for the first, which binds the blocks that the
    # rows land in: whoever is left, the first claim is left.
    claims: list[Claim]
    num_blocks: int  # promised at first
    state: TicketState = TicketState.RESERVED
    lease: BlockLease | None = None  # of the first claim
    num_found_blocks: int = 0  # of the lease: they were there already, and others may read them
    num_reused_tokens: int = 0  # whose rows need not be sent, for they are in the found blocks
    landing: Landing | None = None  # the receiver's, from the first transfer on
    # Set when the state is LANDED or CLOSED: what the Decode call waits for.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    closed_because: str | None = None  # where it was not the Decode call that closed it

    @property
    def num_handoff_tokens(self) -> int:
        """Rows that must be there before the answers can go on."""
        return self.request.newcomer.rows

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

    Until the hand-over the ticket owns claims and blocks, and whatever ends it gives them back;
    from then on the engine does. A block can be found by others only when all its rows have
    landed for certain: after the commit.
    """

    def __init__(
        self,
        pool: BlockPool,
        ledger: CapacityLedger,
        *,
        block_size: int,
        on_change: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change`: blocks have become free, or `wanted` is another list now."""
        self._pool = pool
        self._ledger = ledger
        self._block_size = block_size
        self._on_change = on_change
        self._wanted = WantedRoom(now)
        self._next_epoch = secrets.randbits(62) + 1  # below 2^63: room to count on in a uint64
        self._by_epoch: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._by_epoch)

    @property
    def num_landing(self) -> int:
        """Tickets whose KV is arriving."""
        return sum(t.state is TicketState.LANDING for t in self._by_epoch.values())

    def wanted(self) -> list[Newcomer]:
        """The interactive ones that were refused a moment ago: batch must not delay them."""
        return self._wanted.newcomers()

    def reserve(self, key: AttemptKey, request: TicketRequest) -> Ticket:
        """Promises room for the rows of all answers, as far as the ledger's rule asks for.

        Raises:
            NeverFitsError, NoRoomNowError: and nothing is promised.
        """
        newcomer = request.newcomer
        interactive = newcomer.priority is Priority.INTERACTIVE
        try:
            claims = self._ledger.admit(newcomer, () if interactive else self.wanted())
        except NoRoomNowError:
            if interactive:
                self._wanted.add(request.arrival, newcomer)
                self._on_change()
            raise
        num_blocks = sum(claim.promised for claim in claims)
        ticket = Ticket(key, self._next_epoch, request, claims, num_blocks)
        self._next_epoch += 1
        self._by_epoch[ticket.epoch] = ticket
        if self._wanted.discard(request.arrival, newcomer):
            self._on_change()
        return ticket

    def count_cached_tokens(self, ticket: Ticket) -> int:
        """So many first tokens would not have to be sent, did the transfer begin now."""
        return self._pool.count_cached_prefix(ticket.request.block_hashes) * self._block_size

    def find(self, epoch: int) -> Ticket | None:
        """The open ticket of that epoch."""
        return self._by_epoch.get(epoch)

    def begin_landing(self, ticket: Ticket) -> BlockLease:
        """A transfer begins: turns the credit for the rows into blocks, once."""
        ticket.move_to(TicketState.LANDING)
        if ticket.lease is None:
            self._bind(ticket, ticket.request.block_hashes)
        assert ticket.lease is not None
        return ticket.lease

    def _bind(self, ticket: Ticket, block_hashes: SequenceOf[bytes]) -> BlockLease:
        blocks, ticket.num_found_blocks = self._ledger.bind(ticket.claims[0], block_hashes)
        ticket.num_reused_tokens = ticket.num_found_blocks * self._block_size
        assert ticket.num_reused_tokens <= ticket.num_handoff_tokens, "found more than asked"
        ticket.lease = BlockLease(self._pool, blocks)
        if ticket.num_found_blocks:  # of the blocks that were promised, some are not needed
            self._on_change()
        return ticket.lease

    def break_landing(self, ticket: Ticket) -> None:
        """The transfer ended early: the blocks stay with the ticket, which waits for another."""
        if ticket.state is TicketState.LANDING:
            ticket.move_to(TicketState.RESERVED)

    def finish_landing(self, ticket: Ticket) -> None:
        """Every row of every layer is in its page: others may find the full blocks now."""
        ticket.move_to(TicketState.LANDED)
        assert ticket.lease is not None
        hashes = ticket.request.block_hashes
        for place in range(ticket.num_found_blocks, len(hashes)):
            self._pool.register(ticket.lease.blocks[place], hashes[place])

    def end_answer(self, ticket: Ticket) -> None:
        """One answer less goes on, whichever it is; not the last one: then the ticket is closed.
        Nothing where it is closed: the claims were given back, or the engine has them.
        """
        if ticket.state is TicketState.CLOSED:
            return
        assert ticket.state is not TicketState.DECODING, "the engine has the claims"
        assert len(ticket.claims) > 1, "no answer would be left"
        self._ledger.withdraw(ticket.claims.pop())
        self._on_change()

    def prefill_here(self, ticket: Ticket) -> LandedAnswer:
        """No KV comes: the engine computes the rows, all but `ticket.num_reused_tokens`.

        Of a prompt that is found whole the last block is computed anew, as on a prefill worker: its
        last token's logits are wanted, and nobody writes to a block that others may read.
        """
        assert ticket.lease is None, "a transfer has begun"
        [claim] = ticket.claims
        ticket.move_to(TicketState.DECODING)
        hashes = ticket.request.block_hashes[: (ticket.num_handoff_tokens - 1) // self._block_size]
        return LandedAnswer(claim, self._bind(ticket, hashes), None)

    def hand_over(self, ticket: Ticket) -> list[LandedAnswer]:
        """Gives claims and blocks to the engine's sequences, which release them from now on.

        The first one goes on in the blocks that the rows have landed in. The others share those
        that the rows fill, and have blocks of their own behind them.
        """
        ticket.move_to(TicketState.DECODING)
        landed = ticket.lease
        assert landed is not None
        num_full, rest = divmod(ticket.num_handoff_tokens, self._block_size)
        first, *others = ticket.claims
        answers = [LandedAnswer(first, landed, None)]
        for claim in others:
            own = self._ledger.bind_fork(claim)
            self._pool.share(landed.blocks[: num_full + bool(rest)])
            lease = BlockLease(self._pool, landed.blocks[:num_full] + own)
            source = landed.blocks[num_full] if rest else None
            answers.append(LandedAnswer(claim, lease, source))
        return answers

    def close(self, ticket: Ticket, because: str | None = None) -> None:
        """Voids the epoch and gives back what the ticket still owns. Idempotent."""
        if ticket.state is TicketState.CLOSED:
            return
        ticket.closed_because = because
        handed_over = ticket.state is TicketState.DECODING
        ticket.move_to(TicketState.CLOSED)
        del self._by_epoch[ticket.epoch]
        if handed_over:
            return
        for claim in ticket.claims:
            self._ledger.withdraw(claim)
        if ticket.lease is not None:
            ticket.lease.release()
        self._on_change()

    def close_all(self) -> None:
        """Voids every ticket: the worker ends."""
        for ticket in list(self._by_epoch.values()):
            self.close(ticket, "the worker ended before the KV had landed")
