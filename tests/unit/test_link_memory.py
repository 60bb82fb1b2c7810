"""Rows through shared memory: the same fence as for those inside the frames."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from kv_link import (
    ALL_ROWS,
    KV,
    PIECES,
    REFUSED,
    RESEND,
    TOKENS,
    running_receiver,
)
from ticket_room import ticket_request

from legato.worker.handoff.shared_memory import SenderMemory
from legato.worker.handoff.tickets import TicketState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_link import Link, Rig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux")


async def memory_link(rig: Rig, memory: SenderMemory, **changes: Any) -> Link:  # noqa: ANN401  # of the hello
    link = rig.link()
    welcome = await link.hello(memory=memory.description, **changes)
    assert (welcome.shared_memory, welcome.memory_refused) == (True, "")
    return link


@contextmanager
def slots(num_slots: int = 4, slot_bytes: int = 4096) -> Iterator[SenderMemory]:
    memory = SenderMemory.create(num_slots, slot_bytes)
    try:
        yield memory
    finally:
        memory.close()


async def test_rows_may_come_through_shared_memory() -> None:
    async with running_receiver() as rig:
        with slots() as memory:
            ticket = rig.room.reserve(ticket_request(TOKENS))
            message = rig.message(ticket)
            link = await memory_link(rig, memory)
            await link.ok(link.open_bytes(message, TOKENS))
            frames = [
                link.rows_bytes(message, rows, KV, slot=(i, memory.slot(i)))
                for i, rows in enumerate(PIECES)
            ]
            assert max(len(frame) for frame in frames) < 100
            await link.ok(*frames, link.close_bytes(message, ALL_ROWS))
            assert torch.equal(rig.landed(ticket), KV)
            rig.room.book.close(ticket)


async def test_rows_in_memory_that_changed_or_are_not_there_are_asked_for_again() -> None:
    async with running_receiver() as rig:
        with slots() as memory:
            ticket = rig.room.reserve(ticket_request(TOKENS))
            message = rig.message(ticket)
            link = await memory_link(rig, memory)
            await link.ok(link.open_bytes(message, TOKENS))
            slot = memory.slot(0)
            wrong: list[dict[str, Any]] = [
                {"after": {"num_layers": 2**31 - 1}},
                {"after": {"num_tokens": -1}},
                {"after": {"num_tokens": 2**31 - 1}},
                {"after": {"token_start": 1}},
                {"after": {"epoch": 5}},
            ]
            for spoiled in wrong:
                receipt = await link.ask(
                    link.rows_bytes(message, PIECES[0], KV, slot=(0, slot), **spoiled)
                )
                assert receipt.status == RESEND, spoiled
            for number in (4, 2**31 - 1, -1):  # no such slot
                receipt = await link.ask(
                    link.rows_bytes(message, PIECES[0], KV, slot=(number, slot))
                )
                assert receipt.status == RESEND, number
            assert not rig.pager.pages.any()
            frame = link.rows_bytes(message, PIECES[0], KV, slot=(0, slot), wrong_crc=True)
            assert (await link.ask(frame)).status == RESEND
            frame = link.rows_bytes(message, PIECES[0], KV, slot=(0, slot))
            slot[3] ^= 1
            assert (await link.ask(frame)).status == RESEND
            for rows in PIECES:
                await link.ok(link.rows_bytes(message, rows, KV, slot=(0, slot)))
            await link.ok(link.close_bytes(message, ALL_ROWS))
            assert torch.equal(rig.landed(ticket), KV)
            rig.room.book.close(ticket)


async def test_a_slot_without_memory_ends_the_stream() -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        link = await rig.greeted()
        await link.ok(link.open_bytes(rig.message(ticket), TOKENS))
        room = memoryview(bytearray(4096))
        await link.write(link.rows_bytes(rig.message(ticket), PIECES[0], KV, slot=(0, room)))
        code, details = await link.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "no shared memory was agreed upon" in details
        rig.room.book.close(ticket)


async def test_memory_that_is_refused_leaves_the_other_way() -> None:
    for allowed in (True, False):
        async with running_receiver(shared_memory=allowed) as rig:
            with slots() as memory:
                described = memory.description
                if allowed:
                    described.token = bytes(32)
                ticket = rig.room.reserve(ticket_request(TOKENS))
                message = rig.message(ticket)
                link = rig.link()
                welcome = await link.hello(memory=described)
                assert not welcome.shared_memory
                reason = "does not begin with the token" if allowed else "kv_lane"
                assert reason in welcome.memory_refused
                await link.ok(link.open_bytes(message, TOKENS))
                await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
                await link.ok(link.close_bytes(message, ALL_ROWS))
                rig.room.book.close(ticket)


@pytest.mark.parametrize("end", ["good", "damaged", "refused", "unknown", "closed", "cancelled"])
async def test_the_end_of_a_stream_closes_its_memory(end: str) -> None:
    """At once: what an exception or a task holds is found by the collector at some time."""
    async with running_receiver() as rig:
        mapped, files = num_mapped(), num_files()
        gc.disable()
        try:
            for _ in range(3):
                with slots() as memory:
                    ticket = rig.room.reserve(ticket_request(TOKENS))
                    message = rig.message(ticket)
                    link = await memory_link(rig, memory)
                    await link.ok(link.open_bytes(message, TOKENS))
                    slot = (0, memory.slot(0))
                    match end:
                        case "good":
                            await link.ok(link.rows_bytes(message, PIECES[0], KV, slot=slot))
                        case "damaged":
                            frame = link.rows_bytes(
                                message, PIECES[0], KV, slot=slot, wrong_crc=True
                            )
                            assert (await link.ask(frame)).status == RESEND
                        case "refused":
                            outside = {"token_start": TOKENS}
                            frame = link.rows_bytes(
                                message, PIECES[0], KV, slot=slot, before=outside
                            )
                            assert (await link.ask(frame)).status == REFUSED
                        case "unknown":
                            frame = link.rows_bytes(
                                message, PIECES[0], KV, slot=slot, before={"epoch": 99}
                            )
                            assert (await link.ask(frame)).status == REFUSED
                        case "closed" | "cancelled":
                            rig.pager.go.clear()
                            for _ in range(3):  # of which one has begun
                                await link.write(link.rows_bytes(message, PIECES[0], KV, slot=slot))
                            await rig.until(lambda: rig.pager.num_begun > 0)
                            if end == "closed":
                                rig.room.book.close(ticket)
                                rig.pager.go.set()
                                assert (await link.receipt()).status == REFUSED
                    await link.cut()
                    rig.pager.go.set()
                    rig.pager.num_begun = 0
                    await rig.until(lambda ticket=ticket: ticket.state is not TicketState.LANDING)
                    if end != "closed":
                        rig.room.book.close(ticket)
                    slot[1].release()
            await rig.until(lambda: (num_mapped(), num_files()) == (mapped, files))
        finally:
            gc.enable()
            gc.collect()


def num_files() -> int:
    """Memories of a sender that are open."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # gone meanwhile
            names.append(str(entry.readlink()))
    return sum("memfd:legato-kv" in name for name in names)


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:legato-kv")
