"""BlockPool, BlockLease, TicketBook: no block is ever lost, doubled or given to two owners."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ticket_room import TicketRoom, ticket_request

from legato.worker.handoff.tickets import TicketState
from legato.worker.kv.block_lease import BlockLease, LeaseReleasedError
from legato.worker.kv.block_pool import BlockPool, blocks_for
from legato.worker.scheduling.claim import NeverFitsError, NoRoomNowError

TOTAL = 12


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


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve", "begin", "break", "land", "less", "hand", "close", "end", "pin", "unpin"]
        ),
        st.integers(0, 7),
        st.integers(1, 20),
        st.integers(1, 3),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS)
@example(
    [
        ("reserve", 0, 20, 3),
        ("begin", 0, 0, 0),
        ("land", 0, 0, 0),
        ("hand", 0, 0, 0),
        ("close", 0, 0, 0),
        ("less", 0, 0, 0),
    ]
)
def test_any_history_of_tickets_keeps_the_pool_whole(
    operations: list[tuple[str, int, int, int]],
) -> None:
    """Tickets of several answers, some of whose prompts begin alike, ended at any point."""
    room = TicketRoom.of(TOTAL)
    book, pinned = room.book, list[BlockLease]()
    for name, which, size, num_answers in operations:
        ticket = room.tickets[which % len(room.tickets)] if room.tickets else None
        if name == "reserve":
            request = ticket_request(size, num_answers=num_answers, content=which % 3)
            own = blocks_for(size + 1, 4)
            shared = size // 4 if num_answers > 1 else 0
            fits = shared + num_answers * (own - shared) <= TOTAL
            try:
                room.reserve(request)
            except NoRoomNowError:
                assert fits
            except NeverFitsError:
                assert not fits
        elif name == "end" and room.engine:
            room.end(room.engine[which % len(room.engine)])
        elif name == "unpin" and pinned:
            pinned.pop(which % len(pinned)).drop()
        elif ticket is None:
            continue
        elif name == "begin" and ticket.state is TicketState.RESERVED:
            reused = ticket.num_reused_tokens if ticket.lease is not None else None
            lease = book.begin_landing(ticket)
            assert ticket.lease is lease
            assert reused in (None, ticket.num_reused_tokens)
        elif name == "break":
            book.break_landing(ticket)
        elif name == "land" and ticket.state is TicketState.LANDING:
            book.finish_landing(ticket)
        elif name == "less" and len(ticket.claims) > 1 and ticket.state is not TicketState.DECODING:
            book.end_answer(ticket)
        elif name == "hand" and ticket.state is TicketState.LANDED:
            room.hand_over(ticket)
        elif name == "close":
            book.close(ticket)
            assert book.find(ticket.epoch) is None
        elif name == "pin" and ticket.lease is not None:
            if ticket.lease.released:
                with pytest.raises(LeaseReleasedError):
                    ticket.lease.acquire()
            else:
                ticket.lease.acquire()
                pinned.append(ticket.lease)
        room.check(pinned)

    book.close_all()
    for answer in list(room.engine):
        room.end(answer)
    for lease in pinned:
        lease.drop()
    room.check()
    usage = room.pool.usage()
    assert (usage.held, usage.reserved) == (0, 0)
