"""The stream of a link: who may open it, what ends it, and what it holds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from kv_link import (
    ALL_ROWS,
    COMMITTED,
    KV,
    OK,
    PIECES,
    REFUSED,
    TOKENS,
    Frame,
    Link,
    Rows,
    running_receiver,
)
from ticket_room import ticket_request

from legato.protos import kv_transfer_pb2
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.handoff import link_session
from legato.worker.handoff.tickets import TicketState

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Iterator


def legato_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """And gRPC's, but for what its poller says through asyncio when two loops wake at once."""
    return [record for record in caplog.records if record.name != "asyncio"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"protocol_version": 99}, "protocol_version is 99"),
        ({"receiver_worker_id": "decode-0"}, "receiver_worker_id is 'decode-0'"),
        ({"sender_worker_id": ""}, "sender_worker_id is empty"),
        ({"model_fingerprint": "other"}, "model_fingerprint is 'other'"),
        ({"weights": "int4-g64+float32"}, "weights is"),
        ({"weights": "bfloat16"}, "weights is 'bfloat16', this worker's is 'float32'"),
        ({"kv_wire": "int8"}, "kv_wire is 'int8', this worker's is 'same'"),
        ({"layout.num_layers": 4}, "layout.num_layers is 4"),
        ({"layout.num_kv_heads": 1}, "layout.num_kv_heads is 1"),
        ({"layout.head_dim": 8}, "layout.head_dim is 8"),
        ({"layout.dtype": "bfloat16"}, "layout.dtype is 'bfloat16'"),
        ({"layout.block_size": 128}, None),
    ],
)
async def test_a_hello_is_refused_naming_the_field(
    changes: dict[str, object], named: str | None
) -> None:
    async with running_receiver() as rig:
        link = rig.link()
        hello = link.hello_frame()
        for path, value in changes.items():
            *parents, name = path.split(".")
            message: Any = hello.hello
            for parent in parents:
                message = getattr(message, parent)
            setattr(message, name, value)
        await link.write(hello.SerializeToString())
        if named is None:
            assert (await link.read()).welcome.worker_id == "decode-1"
            return
        code, details = await link.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"hello: {named}" in details


@pytest.mark.parametrize("kv_wire", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("dtype", "weights", "named"),
    [
        ("int8", "float32", None),
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", None),
        ("float32", "int8+float32", "weights is 'int8+float32', this worker's is 'float32'"),
        ("float32", "keep+bfloat16", "weights is 'keep+bfloat16', this worker's is 'float32'"),
        ("float32", "", "weights is '', this worker's is 'float32'"),
    ],
)
async def test_what_may_differ_where_the_wire_has_a_dtype_of_its_own(
    dtype: str, weights: str, named: str | None, kv_wire: str
) -> None:
    async with running_receiver(kv_wire=kv_wire) as rig:
        link = rig.link()
        hello = link.hello_frame()
        hello.hello.layout.dtype = dtype
        hello.hello.weights = weights
        await link.write(hello.SerializeToString())
        if named is None:
            assert (await link.read()).welcome.worker_id == "decode-1"
            return
        code, details = await link.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"hello: {named}" in details


ROWS_CUT_SHORT = Frame(rows=kv_transfer_pb2.KvRows(epoch=1, data=b"xyz")).SerializeToString()[:-1]


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"\x80\x04\x95\x1e\x00",  # how a pickle begins
        b"\x1a",  # rows, and nothing
        b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ROWS_CUT_SHORT,
        Frame(hello=kv_transfer_pb2.KvHello()).SerializeToString(),
    ],
)
async def test_frames_that_are_none_end_the_stream(
    message: bytes, greeted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        link = rig.link()
        if greeted:
            await link.hello()
            await link.ok(link.open_bytes(rig.message(ticket), TOKENS))
        await link.write(message)
        code, details = await link.ended()
        if greeted and message.startswith(b"\x0a"):
            assert (code, details) == (grpc.StatusCode.DATA_LOSS, "hello came twice")
        elif message.startswith(b"\x0a"):
            assert (code, "hello" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        else:
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details
        assert ticket.state is TicketState.RESERVED
        rig.room.book.close(ticket)
    assert legato_records(caplog) == []


async def test_nothing_large_is_looked_at_before_the_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_session, "read_frame", None)
    async with running_receiver() as rig:
        link = rig.link()
        await link.write(
            Frame(rows=kv_transfer_pb2.KvRows(data=bytes(1 << 20))).SerializeToString()
        )
        code, details = await link.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the first frame has 10485" in details


@pytest.mark.parametrize("sequence", [0, 1, 3, 2**32 - 1])
@pytest.mark.parametrize("kind", ["open", "rows", "close"])
async def test_a_gap_in_the_numbers_ends_the_stream(kind: str, sequence: int) -> None:
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        link.sequence = sequence - 1
        await link.write(
            {
                "open": lambda: link.open_bytes(message, TOKENS),
                "rows": lambda: link.rows_bytes(message, PIECES[0], KV),
                "close": lambda: link.close_bytes(message, ALL_ROWS),
            }[kind]()
        )
        code, details = await link.ended()
        assert code is grpc.StatusCode.DATA_LOSS
        assert f"sequence is {sequence}, 2 is next" in details
        assert ticket.state is TicketState.RESERVED
        assert not rig.pager.pages.any()
        rig.room.book.close(ticket)


async def test_a_prefill_worker_receives_nothing() -> None:
    async with running_receiver(role="prefill") as rig:
        link = rig.link()
        code, details = await link.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "Link is not served by a prefill worker" in details


async def test_the_senders_end_comes_after_all_answers() -> None:
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        link = await rig.greeted()
        rig.pager.go.clear()
        frames = [link.open_bytes(message, TOKENS)]
        frames += [link.rows_bytes(message, rows, KV) for rows in PIECES]
        frames += [link.close_bytes(message, ALL_ROWS)]
        for frame in frames:
            await link.write(frame)
        await link.call.done_writing()
        rig.pager.go.set()
        statuses = [(await link.receipt()).status for _ in frames]
        assert statuses == [OK] * 5 + [COMMITTED]
        assert (await link.ended())[0] is grpc.StatusCode.OK
        rig.room.book.close(ticket)


@pytest.mark.parametrize("limit", ["frames", "bytes", "bytes of rows that name a slot as well"])
async def test_what_is_not_answered_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    piece = Rows((0, 1), (0, 1))
    size = len(piece.bytes_of(KV))
    after = {"slot": 1} if "slot" in limit else None
    if limit == "frames":
        monkeypatch.setattr(link_session, "MAX_FRAMES_IN_HAND", 5)
    else:
        monkeypatch.setattr(link_session, "MAX_BYTES_IN_HAND", 5 * size)
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        rig.pager.go.clear()
        for _ in range(40):
            await link.write(link.rows_bytes(message, piece, KV, after=after))
        await rig.until(lambda: rig.pager.num_begun >= 5)
        await asyncio.sleep(0.1)
        assert rig.pager.num_begun == 5
        rig.pager.go.set()
        for _ in range(40):
            assert (await link.receipt()).status == OK
        rig.room.book.close(ticket)


async def test_a_cancel_while_the_stream_ends_leaves_no_task_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender said what is no frame, takes no answer, and is gone."""
    monkeypatch.setattr(link_session, "MAX_SILENCE_S", 0.5)
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        link, message = rig.link(), rig.message(ticket)
        writing = asyncio.Event()

        async def frames() -> AsyncIterator[bytes]:
            yield link.hello_frame().SerializeToString()
            yield link.open_bytes(message, TOKENS)
            yield link.rows_bytes(message, PIECES[0], KV)
            await writing.wait()
            yield b"\xff"

        async def write(answer: kv_transfer_pb2.KvAnswer) -> None:
            if answer.WhichOneof("answer") == "receipt":
                writing.set()
                await asyncio.Event().wait()

        receiver = rig.service._receiver
        session = link_session.LinkSession(receiver, frames(), write, shared_memory=False)
        running = asyncio.create_task(session.run())
        await writing.wait()
        await rig.until(lambda: ticket.state is TicketState.RESERVED)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await running
        await rig.until(
            lambda: not any("LinkSession" in repr(t.get_coro()) for t in asyncio.all_tasks())
        )
        rig.room.book.close(ticket)


async def test_beats_keep_a_quiet_link_and_silence_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_session, "MAX_SILENCE_S", 0.5)
    monkeypatch.setattr(link_session, "BEAT_EVERY_S", 0.1)
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        rig.pager.go.clear()  # the receiver beats while it works, too
        await link.write(link.rows_bytes(message, PIECES[0], KV))
        for _ in range(8):
            await asyncio.sleep(0.1)
            await link.write(Frame(beat=kv_transfer_pb2.KvBeat()).SerializeToString())
        rig.pager.go.set()
        assert (await link.receipt()).status == OK
        assert link.num_beats >= 2
        code, details = await link.ended()
        assert code is grpc.StatusCode.UNAVAILABLE, details
        assert "nothing was heard for 0.5 s" in details
        assert ticket.state is TicketState.RESERVED
        rig.room.book.close(ticket)


VAIN = ["opens", "rows", "opens and rows", "unknown rows", "closes", "commits"]


@pytest.mark.parametrize("what", VAIN)
async def test_a_sender_that_hears_no_answer_is_ended_by_their_number(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_session, "MAX_VAIN_FRAMES", 200)
    async with running_receiver() as rig:
        ticket, message, link = await rig.opened()
        await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
        if what == "commits":
            await link.ok(link.close_bytes(message, ALL_ROWS))

        def frames() -> Iterator[bytes]:
            while True:
                if "opens" in what or what == "commits":
                    yield link.open_bytes(message, TOKENS)
                if "rows" in what:
                    before = {"epoch": 5} if what == "unknown rows" else None
                    yield link.rows_bytes(message, PIECES[0], KV, before=before)
                if what == "commits":
                    yield link.close_bytes(message, ALL_ROWS)
                if what == "closes":
                    yield link.close_bytes(message, commit=False)

        for frame in islice(frames(), 201):
            await link.write(frame)
        code, details = await link.ended()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "200 frames in a row were in vain" in details
        rig.room.book.close(ticket)


async def test_frames_in_vain_that_are_heard_of_do_not_count_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_session, "MAX_VAIN_FRAMES", 30)
    async with running_receiver() as rig:
        link = await rig.greeted()
        for _ in range(5):  # refused ones, then one that is good
            ticket = rig.room.reserve(ticket_request(TOKENS))
            message = rig.message(ticket)
            message.epoch += 1000
            for _ in range(20):
                assert (await link.ask(link.open_bytes(message, TOKENS))).status == REFUSED
            message.epoch -= 1000
            await link.ok(link.open_bytes(message, TOKENS))
            await link.ok(*(link.rows_bytes(message, rows, KV) for rows in PIECES))
            await link.ok(link.close_bytes(message, ALL_ROWS))
            rig.room.book.close(ticket)


async def test_a_sender_that_takes_no_answer_is_ended_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC cannot send a status behind an answer that it still has."""
    monkeypatch.setattr(link_session, "MAX_SILENCE_S", 0.5)
    monkeypatch.setattr(link_session, "MAX_VAIN_FRAMES", 1_000_000)
    options = [*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0)]
    async with running_receiver() as rig:
        ticket = rig.room.reserve(ticket_request(TOKENS))
        message = rig.message(ticket)
        message.key.request_id = "x" * 600  # for long answers
        async with grpc.aio.insecure_channel(rig.address, options=options) as channel:
            link = Link(channel, rig.identity)
            await link.hello()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                for _ in range(100_000):
                    async with asyncio.timeout(2):
                        await link.write(link.open_bytes(message, TOKENS))
            assert link.sequence < 100_000
            await rig.service.ended()
            link.call.cancel()
        rig.room.book.close(ticket)
    assert legato_records(caplog) == []


def test_a_stream_that_the_servers_end_cuts_off_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The event loop ends behind it, and would end it with a traceback."""

    async def scene() -> None:
        async with running_receiver() as rig:
            ticket, message, link = await rig.opened()
            rig.pager.go.clear()
            await link.write(link.rows_bytes(message, PIECES[0], KV))
            await rig.until(lambda: rig.pager.num_begun > 0)
            await rig.server.stop(0)
            ended = asyncio.create_task(rig.service.ended())
            await asyncio.sleep(0.1)
            assert not ended.done()
            rig.pager.go.set()
            await ended
            assert ticket.state is TicketState.RESERVED
            rig.room.book.close(ticket)

    asyncio.run(scene())
    assert legato_records(caplog) == []
