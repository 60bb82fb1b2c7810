"""TicketBook: one ticket for all answers of a call, from the promise to the hand-over."""

from __future__ import annotations

import pytest
from ticket_room import KEY, TicketRoom, ticket_request

from legato.worker.handoff.tickets import TicketRequest, TicketState
from legato.worker.priority import Priority
from legato.worker.scheduling.claim import (
    AdmissionMode,
    NeverFitsError,
    Newcomer,
    NoRoomNowError,
)


def test_epochs_differ_and_start_anywhere() -> None:
    first = {TicketRoom.of(4).reserve(ticket_request(1)).epoch for _ in range(8)}
    assert len(first) == 8
    room = TicketRoom.of(4)
    assert len({room.reserve(ticket_request(1)).epoch for _ in range(4)}) == 4


def test_refused_reservations_promise_nothing_and_say_the_numbers() -> None:
    room = TicketRoom.of(4)
    with pytest.raises(NeverFitsError, match=r"17 rows of KV need 5 blocks of 4 .* 4 in all"):
        room.reserve(ticket_request(2, max_tokens=16))
    with pytest.raises(NeverFitsError, match=r"10 rows .* 3 answers need 5 blocks of 4"):
        room.reserve(ticket_request(9, num_answers=3))
    room.reserve(ticket_request(10))
    with pytest.raises(NoRoomNowError, match="2 blocks are needed now; 1 are available"):
        room.reserve(ticket_request(6))
    assert room.pool.usage().reserved == 3
    room.check()


def test_a_request_names_each_of_its_rows() -> None:
    with pytest.raises(ValueError, match=r"token_ids has 2 ids, newcomer.rows is 3"):
        TicketRequest(Newcomer(rows=3, max_rows=4, max_tokens=2), 0, [1, 2])


def test_the_ticket_names_what_is_promised_for_all_answers() -> None:
    room = TicketRoom.of(20)
    assert room.reserve(ticket_request(9)).num_blocks == 3
    assert room.reserve(ticket_request(9, num_answers=3)).num_blocks == 3 + 1 + 1
    strict = TicketRoom.of(20, mode=AdmissionMode.RESERVE)
    assert strict.reserve(ticket_request(9, max_tokens=8)).num_blocks == 4
    # 2 shared; 2 more for each.
    assert strict.reserve(ticket_request(9, max_tokens=8, num_answers=3)).num_blocks == 2 + 3 * 2


@pytest.mark.parametrize("mode", list(AdmissionMode))
@pytest.mark.parametrize("point", ["reserved", "landing", "broken", "landed"])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_closing_at_any_point_gives_all_back(
    mode: AdmissionMode, point: str, num_answers: int
) -> None:
    room = TicketRoom.of(20, mode=mode)
    ticket = room.reserve(ticket_request(9, num_answers=num_answers, content=1))
    if point != "reserved":
        room.book.begin_landing(ticket)
    if point == "broken":
        room.book.break_landing(ticket)
    if point == "landed":
        room.book.finish_landing(ticket)
    room.check()
    assert not room.told
    room.book.close(ticket)
    room.book.close(ticket)
    room.check()
    assert room.told == [[]]
    assert room.pool.usage().available == 20
    assert ticket.settled.is_set()
    assert len(room.ledger) == 0


def test_blocks_of_a_closed_ticket_stay_while_a_chunk_is_being_written() -> None:
    room = TicketRoom.of(4)
    ticket = room.reserve(ticket_request(9))
    lease = room.book.begin_landing(ticket)
    lease.acquire()
    room.book.close(ticket)
    assert room.pool.usage().held == 3
    assert room.pool.usage().available == 1
    lease.drop()
    room.check()
    assert room.pool.usage().available == 4


@pytest.mark.parametrize("mode", list(AdmissionMode))
@pytest.mark.parametrize("rows", [8, 9])  # whole blocks, and a block begun
def test_answers_share_full_blocks_and_any_may_end_first(mode: AdmissionMode, rows: int) -> None:
    for first_to_end in range(3):
        room = TicketRoom.of(20, mode=mode)
        ticket = room.landed(ticket_request(rows, max_tokens=8, num_answers=3))
        assert ticket.lease is not None
        landed = list(ticket.lease.blocks)
        answers = room.hand_over(ticket)
        room.check()
        assert [answer.lease.blocks[:2] for answer in answers] == [landed[:2]] * 3
        third = [answer.lease.blocks[2] for answer in answers]
        assert len(set(third)) == 3
        assert [answer.source for answer in answers] == (
            [None] * 3 if rows == 8 else [None, landed[2], landed[2]]
        )
        assert [answer.claim.own_blocks for answer in answers] == [
            2 if mode is AdmissionMode.RESERVE else 1
        ] * 3
        for answer in [
            answers[first_to_end],
            *answers[:first_to_end],
            *answers[first_to_end + 1 :],
        ]:
            room.end(answer)
            room.check()
        room.book.close(ticket)
        room.check()
        assert room.pool.usage().available == 20


def test_who_ended_in_prefill_is_withdrawn_and_the_rows_stay_for_the_others() -> None:
    for ended_at in ("reserved", "landing", "landed"):
        room = TicketRoom.of(20)
        ticket = room.reserve(ticket_request(9, num_answers=4))
        if ended_at != "reserved":
            room.book.begin_landing(ticket)
        if ended_at == "landed":
            room.book.finish_landing(ticket)
        room.book.end_answer(ticket)
        room.book.end_answer(ticket)
        room.check()
        usage = room.pool.usage()
        assert usage.held + usage.reserved == 2 + 2  # the shared ones, and one for each
        assert len(room.told) == 2
        if ended_at == "reserved":
            room.book.begin_landing(ticket)
        if ended_at != "landed":
            room.book.finish_landing(ticket)
        first, second = room.hand_over(ticket)
        assert first.lease.blocks[:2] == second.lease.blocks[:2]
        room.check()
        room.end(first)
        room.end(second)
        assert room.pool.usage().available == 20


def test_full_blocks_can_be_found_once_all_rows_are_there_and_not_before() -> None:
    room = TicketRoom.of(20)
    request = ticket_request(10, content=1)
    first = room.reserve(request)
    lease = room.book.begin_landing(first)
    blocks = list(lease.blocks)

    def found() -> int:
        return room.pool.count_cached_prefix(request.block_hashes)

    assert found() == 0
    room.book.break_landing(first)
    assert found() == 0
    # One that comes meanwhile gets blocks of its own, and none of the other's rows.
    meanwhile = room.reserve(request)
    room.book.begin_landing(meanwhile)
    assert meanwhile.num_reused_tokens == 0
    room.book.close(meanwhile)
    assert found() == 0, "its transfer never committed"
    room.book.begin_landing(first)
    room.book.finish_landing(first)
    assert found() == 2
    second = room.reserve(request)
    landing = room.book.begin_landing(second)
    assert (second.num_reused_tokens, landing.blocks[:2]) == (8, blocks[:2])
    assert landing.blocks[2] != blocks[2], "a block that was not full is another's"
    room.book.close(first)
    room.book.close(second)
    room.check()
    assert found() == 2


def test_of_two_that_land_at_once_one_is_found_and_both_are_whole() -> None:
    room = TicketRoom.of(20)
    request = ticket_request(8, content=1)
    tickets = [room.reserve(request) for _ in range(2)]
    leases = [room.book.begin_landing(ticket) for ticket in tickets]
    assert not set(leases[0].blocks) & set(leases[1].blocks)
    for ticket in reversed(tickets):
        room.book.finish_landing(ticket)
    third = room.reserve(request)
    assert room.book.begin_landing(third).blocks[:2] == leases[1].blocks[:2]
    for ticket in [*tickets, third]:
        room.book.close(ticket)
    room.check()


def test_a_second_transfer_finds_what_the_first_one_found_and_no_more() -> None:
    room = TicketRoom.of(20)
    room.book.close(room.landed(ticket_request(8, content=1)))
    ticket = room.reserve(ticket_request(17, content=1))
    room.told.clear()
    lease = room.book.begin_landing(ticket)
    assert room.told == [[]], "what was promised for these blocks may be others'"
    blocks = list(lease.blocks)
    assert ticket.num_reused_tokens == 8
    room.book.break_landing(ticket)
    # Meanwhile another brings all of it.
    room.book.close(room.landed(ticket_request(17, content=1)))
    assert room.book.begin_landing(ticket) is lease
    assert (ticket.num_reused_tokens, lease.blocks) == (8, blocks)
    room.book.finish_landing(ticket)
    room.check()
    room.book.close(ticket)
    room.check()


@pytest.mark.parametrize("num_answers", [1, 2])
def test_a_prompt_that_is_all_there_needs_no_row(num_answers: int) -> None:
    room = TicketRoom.of(20)
    room.book.close(room.landed(ticket_request(8, content=1)))
    ticket = room.landed(ticket_request(8, num_answers=num_answers, content=1))
    assert ticket.num_reused_tokens == ticket.num_handoff_tokens == 8
    # What was found is not given back at its end: it was another's, or may be.
    assert [claim.own_blocks for claim in ticket.claims] == [1] * num_answers
    answers = room.hand_over(ticket)
    assert all(len(answer.lease.blocks) == 3 for answer in answers)
    room.check()
    for answer in answers:
        room.end(answer)
    assert room.pool.usage().available == 20


def test_interactive_ones_that_were_refused_are_wanted_for_a_second() -> None:
    room = TicketRoom.of(8, expected=4)
    there = room.reserve(ticket_request(12, max_tokens=8))
    big = ticket_request(19, max_tokens=8, arrival=7)
    bigger = ticket_request(20, max_tokens=8, arrival=3)
    for request in (big, bigger):
        with pytest.raises(NoRoomNowError):
            room.reserve(request)
    assert room.book.wanted() == [bigger.newcomer, big.newcomer]  # in order of arrival
    assert room.told == [[big.newcomer], [bigger.newcomer, big.newcomer]]
    # A batch newcomer would fit, but not beside those.
    batch = ticket_request(4, arrival=9, priority=Priority.BATCH)
    with pytest.raises(NoRoomNowError):
        room.reserve(batch)
    assert len(room.book.wanted()) == 2, "who yields is not waited for"
    room.reserve(ticket_request(3, arrival=1))  # interactive: it does not have to wait for them

    room.clock[0] = 0.9
    with pytest.raises(NoRoomNowError):
        room.reserve(big)
    room.clock[0] = 1.0
    assert room.book.wanted() == [big.newcomer]
    room.book.close(there)
    room.reserve(big)
    assert room.book.wanted() == []
    assert room.told[-1] == []
    room.clock[0] = 5.0
    room.check()


def test_batch_enters_when_nobody_else_waits_any_more() -> None:
    room = TicketRoom.of(8, expected=4)
    room.reserve(ticket_request(12, max_tokens=8))
    batch = ticket_request(4, priority=Priority.BATCH)
    with pytest.raises(NoRoomNowError):
        room.reserve(ticket_request(19, max_tokens=8))
    with pytest.raises(NoRoomNowError):
        room.reserve(batch)
    room.clock[0] = 1.0
    assert room.reserve(batch).state is TicketState.RESERVED


def test_what_never_fits_is_not_waited_for() -> None:
    room = TicketRoom.of(4)
    with pytest.raises(NeverFitsError):
        room.reserve(ticket_request(40))
    assert room.book.wanted() == []
    assert room.told == []


def test_the_end_of_the_worker_voids_every_ticket() -> None:
    room = TicketRoom.of(40)
    tickets = [
        room.reserve(ticket_request(9, num_answers=2)),
        room.landed(ticket_request(9, num_answers=2)),
        room.landed(ticket_request(9, num_answers=2)),
    ]
    room.hand_over(tickets[2])
    room.book.close_all()
    assert [ticket.state for ticket in tickets] == [TicketState.CLOSED] * 3
    room.check()
    assert room.pool.usage().held == 4  # the engine's
    for answer in list(room.engine):
        room.end(answer)
    room.check()
    assert tickets[0].key == KEY


def test_a_prompt_that_is_computed_here_shares_what_is_found_but_never_its_last_block() -> None:
    room = TicketRoom.of(12)
    [landed] = room.hand_over(room.landed(ticket_request(8, content=1)))
    told = len(room.told)
    for rows, num_shared in ((8, 1), (9, 2), (3, 0)):
        ticket = room.reserve(ticket_request(rows, content=1))
        place = room.book.prefill_here(ticket)
        room.engine.append(place)
        assert ticket.num_reused_tokens == num_shared * 4
        assert place.lease.blocks[:num_shared] == landed.lease.blocks[:num_shared]
        assert not set(place.lease.blocks[num_shared:]) & set(landed.lease.blocks)
        assert len(place.lease.blocks) * 4 >= rows
        room.check()
        room.book.close(ticket)  # the engine has it
        room.check()
        room.end(place)
        room.check()
    assert len(room.told) > told, "blocks that were promised are not needed"
    room.end(landed)
    assert room.pool.usage().available == 12
