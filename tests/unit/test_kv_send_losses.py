"""KvSender whose receiver is silent, gone or out of reach, and its own end."""

from __future__ import annotations

import asyncio
import errno
import time
from itertools import pairwise

import grpc
import pytest
from kv_send_rig import (
    LAYERS,
    MEMORY,
    StepwiseProgress,
    check_landed,
    rig_of,
    ticket,
    until,
)
from link_receiver import (
    ROW_BYTES,
    ArrayMemory,
    FrameSeen,
    LinkReceiver,
)
from tcp_proxy import TcpProxy

from legato.worker.handoff import handoff_error, link, links, outgoing, transfer
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.handoff.retries import Retries
from legato.worker.handoff.shared_memory import MemoryRefusedError


@pytest.mark.usefixtures("hurry")
async def test_silence_breaks_the_link_and_the_transfer_goes_on(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})

    def fault(_: FrameSeen) -> str | None:
        return "silent" if receiver.num_streams == 1 and len(receiver.seen) == 6 else None

    receiver.fault = fault
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert (receiver.num_streams, rig.counters.resumed) == (2, 1)


async def test_rows_over_a_slow_path_come_once_over_one_connection() -> None:
    """All at once they would keep gRPC's pings back for longer than gRPC waits for them."""
    tokens = 3500
    receiver = LinkReceiver(LAYERS, {5: tokens})
    async with rig_of(receiver) as (rig, address), TcpProxy(address) as proxy:
        proxy.bytes_per_s = 0.4e6
        await rig.send(receiver, proxy.address, 5)
        check_landed(receiver, rig, 5)
        assert receiver.num_streams == 1
        assert receiver.duplicates[5] == 0
        assert rig.counters.bytes_sent == LAYERS * tokens * ROW_BYTES


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("how", ["mute", "cut", "nobody"])
async def test_a_receiver_that_does_not_come_back_is_lost(how: str, small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    if how == "cut":
        receiver.fault = lambda seen: "cut" if seen.kind == "rows" else None
    receiver.is_mute = how == "mute"
    async with rig_of(receiver) as (rig, address):
        if how == "nobody":
            address = "127.0.0.1:1"
        with pytest.raises(HandoffError, match="is out of reach") as caught:
            async with asyncio.timeout(10):
                await rig.send(receiver, address, 5)
        assert caught.value.decode_lost
        if how != "nobody":
            assert receiver.num_streams > 1


async def test_a_connection_that_is_refused_at_once_is_not_tried_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert transfer.UNREACHABLE_PATIENCE_S < transfer.PATIENCE_S
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 0.3)
    monkeypatch.setattr(transfer, "PATIENCE_S", 60.0)
    async with rig_of(LinkReceiver(LAYERS, {5: 40})) as (rig, _):
        with pytest.raises(HandoffError, match="is out of reach") as caught:
            async with asyncio.timeout(10):
                await rig.sender.send(rig.complete(5, 40), ticket(5), "127.0.0.1:1")
        assert (caught.value.decode_lost, caught.value.refused) == (True, False)


async def test_a_link_that_was_there_is_waited_for_longer(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is closed for a while; silence before the welcome is no refusal either."""
    monkeypatch.setattr(link, "SILENCE_S", 0.3)
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 0.1)
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})
    receiver.fault = lambda seen: "cut_after" if receiver.num_streams == 1 else None
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        receiver.is_mute = True
        await until(lambda: rig.sender._links._links == {} or receiver.num_streams == 2)
        for held in list(rig.sender._links._links.values()):
            held.is_open = False  # the next transfer makes a link of its own
        sending = asyncio.create_task(rig.send(receiver, address, 6))
        await until(lambda: receiver.num_streams == 4)
        receiver.is_mute = False
        await sending
        check_landed(receiver, rig, 6)


@pytest.mark.parametrize("memory", [False, True])
async def test_a_worker_that_can_make_no_socket_says_so(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver, memory=memory) as (rig, _):
        monkeypatch.setattr(handoff_error.socket, "socket", no_socket)
        with pytest.raises(HandoffError, match=r"can open no link: .*Too many open") as caught:
            await rig.sender.send(rig.complete(5, 40), ticket(5), "127.0.0.1:1")
        assert not caught.value.decode_lost
        await until(lambda: not rig.sender._links._links)
        monkeypatch.undo()
        monkeypatch.setattr(rig.sender._links, "to", no_socket)
        with pytest.raises(HandoffError, match=r"can open no link: .*Too many open") as caught:
            await rig.send(receiver, "127.0.0.1:1", 5)
        assert not caught.value.decode_lost


async def test_what_the_receiver_says_is_told_as_one_clean_line() -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.hello_status = grpc.StatusCode.FAILED_PRECONDITION, "\x00\x1b[31m\r\n" + "x" * 5000
    async with rig_of(receiver) as (rig, address):
        with pytest.raises(HandoffError) as caught:
            await rig.send(receiver, address, 5)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600
        assert (caught.value.decode_lost, caught.value.refused) == (True, True)


@MEMORY
async def test_a_link_that_breaks_again_and_again_is_tried_less_and_less(
    memory: bool, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 2.0)
    opened_at_s: list[float] = []
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})

    def fault(seen: FrameSeen) -> str | None:
        if seen.kind == "open":
            opened_at_s.append(time.monotonic())
        return "cut" if seen.kind == "rows" else None

    receiver.fault = fault
    async with rig_of(receiver, memory=memory) as (rig, address):
        started_at_s = time.monotonic()
        results = await asyncio.gather(
            *(rig.send(receiver, address, epoch) for epoch in (5, 6)), return_exceptions=True
        )
        assert all("is out of reach" in str(error) for error in results)
        assert time.monotonic() - started_at_s < 2.0 + 1.0
        # 0, 0.05, 0.15, 0.35, 0.75, 1.55 s, and not at 2.55
        assert 4 <= receiver.num_streams <= 6
        streams: dict[int, float] = {}
        for seen, at_s in zip(
            (seen for seen in receiver.seen if seen.kind == "open"), opened_at_s, strict=True
        ):
            streams.setdefault(seen.stream, at_s)
        pauses_s = [after - before for before, after in pairwise(streams.values())]
        for pause_s, least_s in zip(pauses_s, (0.05, 0.1, 0.2, 0.4, 0.8), strict=False):
            assert pause_s >= least_s
        assert len(rig.memories) == memory  # the first one's served all


async def test_rows_that_land_make_the_next_try_soon_again() -> None:
    retries = Retries(None)
    now_s = 100.0
    assert retries.wait_s(now_s) == 0
    waits_s = []
    for _ in range(7):
        retries.broke(now_s, moved_rows=False)
        waits_s.append(round(retries.wait_s(now_s), 6))
        now_s += 10
    assert waits_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    retries.broke(now_s, moved_rows=True)
    assert round(retries.wait_s(now_s), 6) == 0.05
    assert retries.wait_s(now_s + 1) == 0


async def test_what_is_the_same_at_every_try_is_logged_once(
    small_chunks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 1.0)
    caplog.set_level("INFO", "legato")
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "rows" else None
    async with rig_of(receiver, memory=True) as (rig, address):
        receiver.shared_memory = False
        with pytest.raises(HandoffError, match="is out of reach"):
            await rig.send(receiver, address, 5)
        assert receiver.num_streams > 2
        assert [hello.HasField("memory") for hello in receiver.hellos[:3]] == [True, False, False]
        (record,) = caplog.records
        why = "KV to {} goes by gRPC, not by shared memory: the receiver gives no reason"
        assert record.getMessage() == why.format(address)


async def test_memory_that_cannot_be_had_is_logged_once(
    small_chunks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: int) -> ArrayMemory:
        raise MemoryRefusedError("memfd_create: Too many open files")

    monkeypatch.setattr(transfer, "PATIENCE_S", 1.0)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "rows" and seen.stream < 4 else None
    async with rig_of(receiver, memory=True) as (rig, address):
        monkeypatch.setattr("link_receiver.ArrayMemory.__init__", no_memory)
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Too many open files" in caplog.text


async def test_memory_of_a_broken_link_goes_where_nobody_comes_back(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RETRIES_KEPT_S", 0.2)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "commit" and seen.stream == 1 else None
    async with rig_of(receiver, memory=True) as (rig, address):
        await rig.send(receiver, address, 5)
        assert len(rig.memories) == 1  # the second link has it
        await asyncio.sleep(0.4)
        assert not rig.memories[0].is_closed
        receiver.num_tokens[6] = 40
        receiver.fault = lambda seen: "refuse" if seen.epoch == 6 else None
        with pytest.raises(HandoffError, match="refused"):
            await rig.send(receiver, address, 6)
        receiver.num_tokens[7] = 40
        receiver.fault = lambda seen: "cut" if seen.epoch == 7 else None
        sending = asyncio.create_task(rig.send(receiver, address, 7))
        # The third stream is cut, too: nobody has asked for a fourth when the send is cancelled.
        await until(lambda: any(s.stream == 3 and s.epoch == 7 for s in receiver.seen))
        sending.cancel()
        await asyncio.wait([sending])
        await until(lambda: rig.memories[0].is_closed)


@pytest.mark.usefixtures("hurry")
async def test_a_receiver_that_lives_but_answers_nothing_is_lost(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 0.5)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "hold" if seen.kind == "open" else None
    async with rig_of(receiver) as (rig, address):
        monkeypatch.setattr(link, "SILENCE_S", 30.0)
        with pytest.raises(HandoffError, match="is out of reach"):
            async with asyncio.timeout(10):
                await rig.send(receiver, address, 5)


@pytest.mark.usefixtures("hurry")
async def test_waiting_for_the_computation_is_not_the_receiver_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 0.4)
    receiver = LinkReceiver(LAYERS, {5: 20})
    receiver.fault = lambda seen: "cut" if seen.stream == 1 and seen.kind == "rows" else None
    async with rig_of(receiver) as (rig, address):
        rig.rows(5, 20)
        progress = StepwiseProgress(20, 5)
        sending = asyncio.create_task(rig.sender.send(progress, ticket(5), address))
        await until(lambda: receiver.num_streams == 1)
        await asyncio.sleep(1.0)
        assert receiver.beats > 0
        for layer in range(LAYERS):
            progress.tell(layer, 20)
        progress.confirm()
        await sending
        check_landed(receiver, rig, 5)
        assert receiver.num_streams == 2


@pytest.mark.usefixtures("hurry")
async def test_an_idle_link_ends_and_a_new_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "IDLE_S", 0.2)
    receiver = LinkReceiver(LAYERS, {5: 20, 6: 20})
    async with rig_of(receiver, memory=True) as (rig, address):
        await rig.send(receiver, address, 5)
        await until(lambda: rig.memories[0].is_closed)
        await rig.send(receiver, address, 6)
        assert (receiver.num_streams, rig.counters.resumed) == (2, 0)


async def test_numbers_that_are_used_up_make_a_new_link(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "LAST_SEQUENCE", 8)
    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert receiver.num_streams > 1


async def test_the_end_of_the_worker_ends_its_transfers(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "hold" if seen.kind == "open" else None
    async with rig_of(receiver, memory=True) as (rig, address):
        sending = asyncio.create_task(rig.send(receiver, address, 5))
        await until(lambda: receiver.seen)
        await rig.sender.close()
        with pytest.raises(HandoffError, match="this worker ends") as caught:
            await sending
        assert not caught.value.decode_lost


async def test_closing_at_once_ends_a_transfer_too() -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver) as (rig, address):
        sending = asyncio.create_task(rig.send(receiver, address, 5))
        await asyncio.sleep(0)
        await rig.sender.close()
        with pytest.raises(HandoffError, match="this worker ends"):
            async with asyncio.timeout(5):
                await sending
