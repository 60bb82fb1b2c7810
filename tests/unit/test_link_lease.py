"""The lease of a transfer: a ticket whose prefill worker is gone."""

from __future__ import annotations

import asyncio

import pytest
from kv_link import (
    ALL_ROWS,
    KV,
    PIECES,
    TOKENS,
    running_receiver,
)
from ticket_room import ticket_request

from legato.worker.handoff import incoming, link_session
from legato.worker.handoff.tickets import TicketState


@pytest.mark.parametrize("end", ["cut", "given up", "refused"])
async def test_a_ticket_that_nobody_comes_back_to_is_void(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    for module in (incoming, link_session):
        monkeypatch.setattr(module, "LEASE_S", 0.3)
    monkeypatch.setattr(incoming.IncomingTransfer.break_off, "__defaults__", (0.3,))
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        waiting = rig.room.reserve(ticket_request(TOKENS))  # no transfer has begun
        message = rig.message(ticket)
        link = await rig.greeted()
        await link.ok(link.open_bytes(message, TOKENS))
        await link.ok(link.rows_bytes(message, PIECES[0], KV))
        match end:
            case "cut":
                await link.cut()
            case "given up":
                await link.ok(link.close_bytes(message, commit=False))
            case "refused":
                await link.ask(link.close_bytes(message, ALL_ROWS))
        await rig.until(lambda: ticket.state is TicketState.CLOSED)
        assert ticket.settled.is_set()
        assert "no KV came for 0.3 s from prefill-1" in (ticket.closed_because or "")
        assert rig.room.pool.usage().held == 0
        assert waiting.state is TicketState.RESERVED
        rig.room.book.close(waiting)


async def test_who_comes_back_in_time_has_a_lease_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (incoming, link_session):
        monkeypatch.setattr(module, "LEASE_S", 1.0)
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.cut()
        await rig.until(lambda: ticket.state is TicketState.RESERVED)
        link = await rig.greeted()
        await link.ok(link.open_bytes(message, TOKENS))
        await asyncio.sleep(0.8)
        await link.ok(link.rows_bytes(message, PIECES[0], KV))  # it is heard now
        await link.cut()
        await rig.until(lambda: ticket.state is TicketState.RESERVED)
        await asyncio.sleep(0.5)
        assert ticket.state is TicketState.RESERVED, "the lease of the first one has counted"
        link = await rig.greeted()
        await link.ok(link.open_bytes(message, TOKENS))
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        await link.ok(link.close_bytes(message, ALL_ROWS))
        await link.cut()
        await asyncio.sleep(1.2)
        assert ticket.state is TicketState.LANDED
        rig.room.book.close(ticket)
