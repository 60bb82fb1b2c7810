"""The fence of a link: no frame that is late, stray, damaged or absurd ever touches a page."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kv_link import (
    ALL_ROWS,
    COMMITTED,
    KV,
    LAYERS,
    OK,
    PIECES,
    REFUSED,
    RESEND,
    TOKENS,
    Rows,
    content,
    running_receiver,
)
from ticket_room import ticket_request

from legato.worker.handoff.tickets import TicketState

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_rows_in_any_order_and_twice_are_all_there_at_the_commit() -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        link = await rig.greeted()
        opened = await link.ask(link.open_bytes(message, TOKENS))
        assert (opened.status, opened.epoch, opened.attempt) == (OK, ticket.epoch, 0)
        assert (list(opened.landed_tokens), opened.reused_tokens) == ([0] * LAYERS, 0)
        for rows in [*reversed(PIECES), PIECES[1], Rows((0, 3), (3, 7))]:
            receipt = await link.ask(link.rows_bytes(message, rows, KV))
            assert receipt.status == OK
            assert (receipt.layer_start, receipt.token_start, receipt.kv_head_start) == (
                rows.layers[0],
                rows.tokens[0],
                rows.heads[0],
            )
        closed = await link.ask(link.close_bytes(message, ALL_ROWS))
        assert closed.status == COMMITTED
        assert ticket.state is TicketState.LANDED
        assert torch.equal(rig.landed(ticket), KV)
        assert (rig.counters.completed, rig.counters.failed) == (1, 0)
        rig.room.book.close(ticket)


async def test_frames_may_follow_without_waiting_for_answers() -> None:
    async with running_receiver() as rig:
        tickets = [rig.room.reserve(ticket_request(TOKENS)) for _ in range(3)]
        kvs = [content(TOKENS, salt) for salt in range(3)]
        link = await rig.greeted()
        messages = [link.open_bytes(rig.message(t), TOKENS) for t in tickets]
        for piece in PIECES:  # all three interleaved
            for ticket, kv in zip(tickets, kvs, strict=True):
                messages.append(link.rows_bytes(rig.message(ticket), piece, kv))
        messages += [link.close_bytes(rig.message(t), ALL_ROWS) for t in tickets]
        await link.ok(*messages)
        for ticket, kv in zip(tickets, kvs, strict=True):
            assert torch.equal(rig.landed(ticket), kv)
            rig.room.book.close(ticket)


@pytest.mark.parametrize("spoiled", [{"damage": 7}, {"damage": 255}, {"wrong_crc": True}])
async def test_damaged_rows_are_asked_for_again_and_touch_no_others(
    spoiled: dict[str, Any],
) -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES[1:]))
        before = rig.pager.pages.clone()
        for _ in range(3):
            receipt = await link.ask(link.rows_bytes(message, PIECES[0], KV, **spoiled))
            assert (receipt.status, receipt.sequence) == (RESEND, link.sequence)
        touched = rig.landed(ticket)[slice(*PIECES[0].layers), :, slice(*PIECES[0].tokens)]
        assert rig.counters.chunks_refused == 3
        assert torch.count_nonzero(rig.pager.pages - before) == torch.count_nonzero(touched)
        await link.ok(link.rows_bytes(message, PIECES[0], KV))
        await link.ok(link.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


async def test_rows_that_landed_and_come_damaged_then_are_there_no_more() -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        receipt = await link.ask(link.rows_bytes(message, PIECES[1], KV, damage=7))
        assert receipt.status == RESEND
        # Not even while they are written: this end comes before that is known.
        rig.pager.go.clear()
        await link.write(link.rows_bytes(message, PIECES[0], KV, damage=7))
        await rig.until(lambda: rig.pager.num_begun == len(PIECES) + 2)
        other = await rig.greeted()
        receipt = await other.ask(other.open_bytes(message, TOKENS))
        assert list(receipt.landed_tokens) == [0, 0, TOKENS]
        receipt = await other.ask(other.close_bytes(message, ALL_ROWS))
        assert receipt.status == REFUSED
        assert "has not landed" in receipt.reason
        rig.pager.go.set()
        third = await rig.greeted()
        await third.ok(third.open_bytes(message, TOKENS))
        await third.ok(*(third.rows_bytes(message, rows, KV) for rows in PIECES[:2]))
        await third.ok(third.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


async def test_rows_do_not_count_while_the_next_transfer_writes_them() -> None:
    """An earlier one's, which are good, end while a later one's are on their way to the pages."""
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        first, second = rig.pager.hold(2)
        await link.write(link.rows_bytes(message, PIECES[0], KV))
        await rig.until(lambda: rig.pager.num_begun == 1)
        other = await rig.greeted()
        await other.ok(other.open_bytes(message, TOKENS))
        await other.write(other.rows_bytes(message, PIECES[0], KV, damage=7))
        await rig.until(lambda: rig.pager.num_begun == 2)
        first.set()
        assert (await link.receipt()).status == OK
        third = await rig.greeted()
        receipt = await third.ask(third.open_bytes(message, TOKENS))
        assert list(receipt.landed_tokens) == [0, 0, 0]
        second.set()
        assert (await other.receipt()).status == RESEND
        await third.ok(*(third.rows_bytes(message, rows, KV) for rows in PIECES))
        await third.ok(third.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


@pytest.mark.parametrize("other_link", [False, True])
async def test_damaged_rows_behind_the_same_rows_on_their_way_are_not_there(
    other_link: bool,
) -> None:
    """Both are in hand at once: that the first ones land says nothing of what is there then."""
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES[1:]))
        rig.pager.go.clear()
        await link.write(link.rows_bytes(message, PIECES[0], KV))
        await rig.until(lambda: rig.pager.num_begun == len(PIECES))
        second = link
        if other_link:
            second = await rig.greeted()
            await second.ok(second.open_bytes(message, TOKENS))
        await second.write(second.rows_bytes(message, PIECES[0], KV, damage=7))
        await rig.until(lambda: rig.pager.num_begun == len(PIECES) + 1)
        rig.pager.go.set()
        assert (await link.receipt()).status == OK
        assert (await second.receipt()).status == RESEND
        receipt = await second.ask(second.close_bytes(message, ALL_ROWS))
        assert (receipt.status, "has not landed" in receipt.reason) == (REFUSED, True)
        await second.ok(second.open_bytes(message, TOKENS))
        await second.ok(second.rows_bytes(message, PIECES[0], KV))
        await second.ok(second.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


@pytest.mark.parametrize(
    "after",
    [
        {"epoch": 1},
        {"attempt": 7},
        {"layer_start": 1},
        {"layer_start": 99},
        {"num_layers": 1},
        {"num_layers": 2**31 - 1},
        {"token_start": 1},
        {"token_start": -1},
        {"num_tokens": 3},
        {"kv_head_start": 1},
        {"num_kv_heads": 1},
        {"num_kv_heads": 0},
    ],
)
async def test_a_header_that_was_damaged_is_not_believed(after: dict[str, int]) -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        receipt = await link.ask(link.rows_bytes(message, PIECES[0], KV, after=after))
        assert receipt.status == RESEND
        assert not rig.pager.pages.any()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        await link.ok(link.close_bytes(message, ALL_ROWS))
        rig.room.book.close(ticket)


async def test_endless_damage_ends_the_transfer() -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        statuses = [
            (await link.ask(link.rows_bytes(message, PIECES[0], KV, damage=0))).status
            for _ in range(17)
        ]
        assert statuses == [RESEND] * 16 + [REFUSED]
        assert ticket.state is TicketState.RESERVED
        rig.room.book.close(ticket)


@pytest.mark.parametrize(
    ("before", "data", "named"),
    [
        ({"attempt": 7}, None, "attempt is 7"),
        ({"layer_start": 2}, None, "layers"),  # 2 + 2 > 3
        ({"layer_start": -1}, None, "layers"),
        ({"num_layers": 0}, None, "layers"),
        ({"num_layers": 2**31 - 1}, None, "layers"),
        ({"token_start": 7}, None, "tokens"),  # 7 + 4 > 10
        ({"token_start": 2**31 - 1, "num_tokens": 2**31 - 1}, None, "tokens"),
        ({"kv_head_start": 1}, None, "KV heads"),
        ({"num_kv_heads": 2**31 - 1}, None, "KV heads"),
        ({"num_tokens": 3}, None, "bytes"),  # a truncated range
        ({}, b"x" * 100, "bytes"),  # cut
        ({}, b"", "bytes"),
        ({}, b"x" * (1 << 20), "bytes"),
    ],
)
async def test_wrong_rows_end_the_transfer_and_touch_nothing(
    before: dict[str, int], data: bytes | None, named: str
) -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        other = rig.room.reserve(ticket_request(TOKENS))
        message, beside = rig.message(ticket), rig.message(other)
        link = await rig.greeted()
        await link.ok(link.open_bytes(message, TOKENS), link.open_bytes(beside, TOKENS))
        receipt = await link.ask(link.rows_bytes(message, PIECES[0], KV, before=before, data=data))
        assert receipt.status == REFUSED
        assert named in receipt.reason
        assert not rig.pager.pages.any()
        assert rig.counters.chunks_refused == rig.counters.failed == 1
        # What was on its way is refused as well, and the stream goes on for others.
        receipt = await link.ask(link.rows_bytes(message, PIECES[0], KV))
        assert (receipt.status, "no transfer of epoch" in receipt.reason) == (REFUSED, True)
        await link.ok(*(link.rows_bytes(beside, rows, KV) for rows in PIECES))
        await link.ok(link.close_bytes(beside, ALL_ROWS))
        # The ticket lives on: a clean transfer brings all.
        await link.ok(link.open_bytes(message, TOKENS))
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        await link.ok(link.close_bytes(message, ALL_ROWS))
        for each in (ticket, other):
            assert torch.equal(rig.landed(each), KV)
            rig.room.book.close(each)


async def test_nothing_commits_before_every_row_of_every_layer_is_there() -> None:
    async with running_receiver() as rig:
        for skipped in range(len(PIECES)):
            ticket, message, link = await rig.opened()
            pieces = [p for i, p in enumerate(PIECES) if i != skipped]
            await link.ok(*(link.rows_bytes(message, rows, KV) for rows in pieces))
            receipt = await link.ask(link.close_bytes(message, ALL_ROWS))
            lost = PIECES[skipped]
            assert receipt.status == REFUSED
            assert f"layer {lost.layers[0]}, token {lost.tokens[0]} has not" in receipt.reason
            assert ticket.state is TicketState.RESERVED
            rig.room.book.close(ticket)


@pytest.mark.parametrize("num_rows", [0, ALL_ROWS - 1, ALL_ROWS + 1, -1, 2**62])
async def test_who_counts_otherwise_does_not_commit(num_rows: int) -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        receipt = await link.ask(link.close_bytes(message, num_rows))
        assert receipt.status == REFUSED
        assert f"num_rows is {num_rows}, {ALL_ROWS} have landed" in receipt.reason
        rig.room.book.close(ticket)


@pytest.mark.parametrize("new_link", [True, False])
@pytest.mark.parametrize("cut_after", range(len(PIECES) + 1))
async def test_a_later_open_goes_on_from_what_has_landed(cut_after: int, new_link: bool) -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES[:cut_after]))
        if new_link:
            await link.cut()
            await rig.until(lambda: rig.counters.failed == 1)
            assert ticket.state is TicketState.RESERVED
            assert rig.room.pool.usage().held == 3, "what has landed is lost"
            link = await rig.greeted()
        opened = await link.ask(link.open_bytes(message, TOKENS))
        assert (
            list(opened.landed_tokens)
            == {
                0: [0, 0, 0],
                1: [4, 4, 0],
                2: [10, 10, 0],
                3: [10, 10, 0],  # of one head
                4: [10, 10, 10],
            }[cut_after]
        )
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES[cut_after:]))
        await link.ok(link.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


async def test_a_commit_whose_answer_was_lost_is_answered_again() -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        await link.write(link.close_bytes(message, ALL_ROWS))
        await rig.until(lambda: ticket.state is TicketState.LANDED)
        await link.cut()
        for state in (TicketState.LANDED, TicketState.DECODING, TicketState.CLOSED):
            if state is TicketState.DECODING:
                rig.room.hand_over(ticket)
            if state is TicketState.CLOSED:
                rig.room.book.close(ticket)
            assert ticket.state is state
            again = await rig.greeted()
            opened = await again.ask(again.open_bytes(message, TOKENS))
            assert list(opened.landed_tokens) == [TOKENS] * LAYERS
            receipt = await again.ask(again.close_bytes(message, ALL_ROWS))
            assert receipt.status == COMMITTED
            # But nothing is written any more, and no other sender is told so.
            await again.ok(again.open_bytes(message, TOKENS))
            receipt = await again.ask(again.rows_bytes(message, PIECES[0], content(TOKENS, 9)))
            assert (receipt.status, receipt.reason) == (REFUSED, "rows: the KV is complete")
            stranger = await rig.greeted(sender_worker_id="prefill-2")
            receipt = await stranger.ask(stranger.open_bytes(message, TOKENS))
            assert (receipt.status, "its KV is there" in receipt.reason) == (REFUSED, True)
        assert torch.equal(rig.pager.rows_of(rig.room.engine[0].lease.blocks, TOKENS), KV)
        assert (rig.counters.completed, rig.counters.failed) == (1, 0)
        rig.room.end(rig.room.engine[0])


async def test_a_second_stream_takes_the_transfer_over() -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        first, second = await rig.greeted(), await rig.greeted()
        await first.ok(first.open_bytes(message, TOKENS))
        await first.ok(first.rows_bytes(message, PIECES[0], KV))
        opened = await second.ask(second.open_bytes(message, TOKENS))
        assert list(opened.landed_tokens) == [4, 4, 0]
        receipt = await first.ask(first.rows_bytes(message, PIECES[1], content(TOKENS, 5)))
        assert (receipt.status, "taken the transfer over" in receipt.reason) == (REFUSED, True)
        receipt = await first.ask(first.close_bytes(message, ALL_ROWS))
        assert receipt.status == REFUSED
        await second.ok(*(second.rows_bytes(message, rows, KV) for rows in PIECES[1:]))
        await first.cut()  # breaks nothing that is not its own
        await asyncio.sleep(0.05)
        assert ticket.state is TicketState.LANDING
        await second.ok(second.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        assert rig.counters.failed == 0
        rig.room.book.close(ticket)


async def test_rows_of_two_senders_never_make_one_sequence() -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        first = await rig.greeted()
        await first.ok(first.open_bytes(message, TOKENS))
        await first.ok(first.rows_bytes(message, PIECES[0], content(TOKENS, 3)))
        rig.pager.go.clear()
        for rows in PIECES[1:]:
            await first.write(first.rows_bytes(message, rows, content(TOKENS, 3)))
        await rig.until(lambda: rig.pager.num_begun == len(PIECES))
        second = await rig.greeted(sender_worker_id="prefill-2")
        opened = await second.ask(second.open_bytes(message, TOKENS))
        assert list(opened.landed_tokens) == [0] * LAYERS
        for rows in PIECES:
            await second.write(second.rows_bytes(message, rows, KV))
        rig.pager.go.set()
        for _ in PIECES:
            assert (await second.receipt()).status == OK
        await second.ok(second.close_bytes(message, ALL_ROWS))
        assert torch.equal(rig.landed(ticket), KV)
        rig.room.book.close(ticket)


async def test_a_stray_frame_of_an_old_epoch_leaves_the_new_owner_alone() -> None:
    async with running_receiver(num_blocks=3) as rig:  # the pool is one request
        old = rig.room.reserve(ticket_request(TOKENS))
        stale = rig.message(old)
        link = await rig.greeted()
        await link.ok(link.open_bytes(stale, TOKENS))
        await link.ok(link.rows_bytes(stale, PIECES[0], KV))
        assert old.lease is not None
        blocks = list(old.lease.blocks)
        rig.room.book.close(old)
        new = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(new)
        landing = await rig.greeted()
        await landing.ok(landing.open_bytes(message, TOKENS))
        await landing.ok(*(landing.rows_bytes(message, rows, KV) for rows in PIECES))
        assert new.lease is not None
        assert sorted(new.lease.blocks) == sorted(blocks)
        for sender in (link, landing):
            receipt = await sender.ask(sender.rows_bytes(stale, PIECES[0], content(TOKENS, 7)))
            assert receipt.status == REFUSED
            assert torch.equal(rig.landed(new), KV)
        await landing.ok(landing.close_bytes(message, ALL_ROWS))
        rig.room.book.close(new)


async def test_rows_checked_but_not_yet_written_cannot_reach_the_next_owner() -> None:
    async with running_receiver(num_blocks=3) as rig:  # the pool is one request
        old = rig.room.reserve(ticket_request(TOKENS))
        link = await rig.greeted()
        await link.ok(link.open_bytes(rig.message(old), TOKENS))
        rig.pager.go.clear()
        await link.write(link.rows_bytes(rig.message(old), PIECES[0], content(TOKENS, 7)))
        await rig.until(lambda: rig.pager.num_begun == 1)
        rig.room.book.close(old)
        new = rig.room.reserve(ticket_request(TOKENS))
        landing = await rig.greeted()
        await landing.ok(landing.open_bytes(rig.message(new), TOKENS))
        rig.pager.go.set()
        receipt = await link.receipt()
        assert (receipt.status, "its blocks are gone" in receipt.reason) == (REFUSED, True)
        assert not rig.pager.pages.any()
        rig.room.book.close(new)


async def test_who_gives_up_leaves_the_ticket_open() -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(link.rows_bytes(message, PIECES[0], KV))
        receipt = await link.ask(link.close_bytes(message, commit=False))
        assert receipt.status == OK
        assert ticket.state is TicketState.RESERVED
        assert rig.counters.failed == 1
        opened = await link.ask(link.open_bytes(message, TOKENS))
        assert list(opened.landed_tokens) == [4, 4, 0]
        rig.room.book.close(ticket)


async def test_what_was_found_is_not_sent_and_cannot_be_overwritten() -> None:
    async with running_receiver() as rig:
        rig.room.book.close(rig.room.landed(ticket_request(8, content=1)))
        ticket = rig.room.reserve(ticket_request(TOKENS, content=1))
        message = rig.message(ticket)
        for tokens in ((0, 4), (4, 10), (7, 8), (7, 10)):
            link = await rig.greeted()
            opened = await link.ask(link.open_bytes(message, TOKENS))
            assert (list(opened.landed_tokens), opened.reused_tokens) == ([8] * LAYERS, 8)
            receipt = await link.ask(link.rows_bytes(message, Rows((0, 3), tokens), KV))
            assert receipt.status == REFUSED
            assert f"tokens {tokens[0]} to {tokens[1]} are not within [8, 10)" in receipt.reason
        assert not rig.pager.pages.any()
        link = await rig.greeted()
        await link.ok(link.open_bytes(message, TOKENS))
        await link.ok(link.rows_bytes(message, Rows((0, 3), (8, 10)), KV))
        await link.ok(link.close_bytes(message, LAYERS * 2))
        rig.room.book.close(ticket)
        # All of it: a commit without a row.
        ticket = rig.room.reserve(ticket_request(8, content=1))
        message = rig.message(ticket)
        await link.ok(link.open_bytes(message, 8), link.close_bytes(message, 0))
        assert ticket.state is TicketState.LANDED
        rig.room.book.close(ticket)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: setattr(t, "epoch", 1), "ticket.epoch 1 is not open"),
        (lambda t: setattr(t, "worker_id", "decode-restarted"), "ticket.worker_id is"),
        (lambda t: setattr(t.key, "attempt", 9), "ticket.key is"),
        (lambda t: setattr(t.key, "request_id", "x" * 60_000), "ticket.key is"),
        (None, "num_tokens is 9, the ticket is for 10"),
    ],
)
async def test_an_open_is_refused_naming_the_field(
    spoil: Callable[[Any], None] | None, named: str
) -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        if spoil is not None:
            spoil(message)
        link = await rig.greeted()
        receipt = await link.ask(link.open_bytes(message, TOKENS if spoil else 9))
        assert receipt.status == REFUSED
        assert f"open: {named}" in receipt.reason
        assert len(receipt.reason) <= 500
        assert rig.room.pool.usage().held == 0
        rig.room.book.close(ticket)
