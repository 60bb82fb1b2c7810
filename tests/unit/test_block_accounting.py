"""BlockPool, BlockLease, TicketBook: no block is ever lost, doubled or given to two owners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.worker.handoff.tickets import (
    AttemptKey,
    NeverFitsError,
    NoRoomNowError,
    Ticket,
    TicketBook,
    TicketState,
)
from legato.worker.kv.block_lease import BlockLease, LeaseReleasedError
from legato.worker.kv.block_pool import BlockPool, blocks_for

TOTAL = 12
KEY = AttemptKey("r", 0)


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_block_is_freed_once_and_only_by_its_holder() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    with pytest.raises(ValueError, match="twice"):
        pool.free([blocks[0], blocks[0]])
    with pytest.raises(ValueError, match="not held"):
        pool.free([*blocks, 3])
    assert pool.usage().held == 2
    pool.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.free(blocks)
    pool.check_integrity()


def test_a_promise_is_kept_from_those_who_allocate() -> None:
    pool = BlockPool(4)
    assert pool.reserve(3)
    assert pool.allocate(2) is None
    assert not pool.reserve(2)
    assert len(pool.allocate_reserved(3)) == 3
    with pytest.raises(ValueError, match="not promised"):
        pool.allocate_reserved(1)
    with pytest.raises(ValueError, match="not promised"):
        pool.unreserve(1)


def test_blocks_come_back_with_the_last_pin_and_no_pin_follows_a_release() -> None:
    pool = BlockPool(4)
    lease = BlockLease(pool, pool.allocate(2) or [])
    lease.acquire()
    with lease.pinned():
        lease.release()
        lease.release()
        with pytest.raises(LeaseReleasedError):
            lease.acquire()
    assert pool.usage().held == 2
    lease.drop()
    assert pool.usage().free == 4
    pool.check_integrity()


def test_epochs_differ_and_start_anywhere() -> None:
    first = {TicketBook(BlockPool(4), 4).reserve(KEY, 1, 1).epoch for _ in range(8)}
    assert len(first) == 8
    book = TicketBook(BlockPool(4), 4)
    assert len({book.reserve(KEY, 1, 1).epoch for _ in range(4)}) == 4


def test_refused_reservations_promise_nothing() -> None:
    pool = BlockPool(4)
    book = TicketBook(pool, 4)
    with pytest.raises(NeverFitsError, match="17 needs 5 blocks of 4 tokens; this worker has 4"):
        book.reserve(KEY, 1, 17)
    book.reserve(KEY, 1, 12)
    with pytest.raises(NoRoomNowError, match="needs 2 blocks; 1 are free"):
        book.reserve(KEY, 1, 8)
    with pytest.raises(ValueError, match="num_handoff_tokens"):
        book.reserve(KEY, 5, 4)
    assert pool.usage().reserved == 3


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "begin", "break", "land", "hand", "close", "release", "pin"]),
        st.integers(0, 7),
        st.integers(1, 20),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_any_history_of_tickets_keeps_the_pool_whole(
    operations: list[tuple[str, int, int]],
) -> None:
    pool = BlockPool(TOTAL)
    book = TicketBook(pool, 4)
    tickets: list[Ticket] = []
    pinned: list[BlockLease] = []
    handed: list[BlockLease] = []
    for name, which, size in operations:
        ticket = tickets[which % len(tickets)] if tickets else None
        if name == "reserve":
            try:
                tickets.append(book.reserve(KEY, 1, size))
            except NoRoomNowError:
                assert blocks_for(size, 4) > pool.usage().available
        elif ticket is None:
            continue
        elif name == "begin" and ticket.state is TicketState.RESERVED:
            book.begin_landing(ticket)
        elif name == "break":
            book.break_landing(ticket)
        elif name == "land" and ticket.state is TicketState.LANDING:
            book.finish_landing(ticket)
        elif name == "hand" and ticket.state is TicketState.LANDED:
            handed.append(book.hand_over(ticket))
        elif name == "close":
            book.close(ticket)
            assert book.find(ticket.epoch) is None
        elif name == "release" and handed:
            handed.pop(which % len(handed)).release()
        elif name == "pin" and pinned and which % 2:
            pinned.pop().drop()
        elif name == "pin" and ticket.lease is not None:
            if ticket.lease.released:
                with pytest.raises(LeaseReleasedError):
                    ticket.lease.acquire()
            else:
                ticket.lease.acquire()
                pinned.append(ticket.lease)

        pool.check_integrity()
        usage = pool.usage()
        assert usage.available + usage.reserved + usage.held == TOTAL
        live = [t for t in tickets if book.find(t.epoch) is t]
        assert usage.reserved == sum(t.num_blocks for t in live if t.lease is None)
        owned = {
            id(lease): lease.blocks
            for lease in [
                *(t.lease for t in live if t.lease is not None and not t.lease.released),
                *pinned,
                *handed,
            ]
        }
        blocks = [b for some in owned.values() for b in some]
        assert len(blocks) == len(set(blocks)) == usage.held

    book.close_all()
    for lease in [*handed]:
        lease.release()
    for lease in pinned:
        lease.drop()
    assert pool.usage().free == TOTAL
    pool.check_integrity()
