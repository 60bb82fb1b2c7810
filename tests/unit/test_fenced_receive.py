"""The fence: no chunk that is late, stray, damaged or absurd ever touches a page."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kv_push import (
    MODEL,
    PROMPT,
    Ack,
    Push,
    Stream,
    all_chunks,
    begin,
    blocks_of,
    chunk,
    commit,
    decoded,
    reserved,
)
from worker_pair import Attempt, running_pair, running_worker, sampling

from legato.kernels.crc32c import crc32c
from legato.protos import kv_transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

Chunk = kv_transfer_pb2.KvChunk


async def test_chunks_in_any_order_and_twice_give_the_right_answer() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, ticket))
        chunks = all_chunks(ticket)
        for one in [*reversed(chunks), chunks[2], chunk(ticket, 1, 2, 5)]:
            await stream.ok(Push(chunk=one))
        assert (await stream.ask(commit(ticket))).status == Ack.STATUS_COMMITTED
        assert await decoded(attempt) == MODEL.expected(PROMPT, 16)[1:]
        await worker.until_idle()


async def test_a_flipped_byte_is_asked_for_again_and_touches_nothing() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, ticket))
        damaged = chunk(ticket, 0, 0, 4)
        damaged.data = damaged.data[:7] + bytes([damaged.data[7] ^ 1]) + damaged.data[8:]
        ack = await stream.ask(Push(chunk=damaged))
        assert (ack.status, ack.layer, ack.token_start) == (Ack.STATUS_RESEND, 0, 0)
        assert all(not bool(layer.k.any()) for layer in worker.server.node.cache.layers)
        assert worker.load().kv_chunks_refused == 1
        await stream.ok(*(Push(chunk=c) for c in all_chunks(ticket)), commit(ticket))
        assert await decoded(attempt) == MODEL.expected(PROMPT, 16)[1:]
        await worker.until_idle()


async def test_endless_damage_ends_the_transfer() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        assert attempt.ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, attempt.ticket))
        damaged = chunk(attempt.ticket, 0, 0, 4)
        damaged.crc32c ^= 1
        statuses = [(await stream.ask(Push(chunk=damaged))).status for _ in range(17)]
        assert statuses == [Ack.STATUS_RESEND] * 16 + [Ack.STATUS_REFUSED]
        attempt.close()
        await worker.until_idle()


def wrong(**changes: object) -> Callable[[Chunk], None]:
    def apply(one: Chunk) -> None:
        for name, value in changes.items():
            setattr(one, name, value)

    return apply


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (wrong(epoch=1), "epoch"),
        (wrong(attempt=7), "attempt"),
        (wrong(layer=3), "layer"),
        (wrong(layer=-1), "layer"),
        (wrong(token_start=7), "tokens"),  # 7 + 4 > 10
        (wrong(token_start=-4), "tokens"),
        (wrong(num_tokens=0), "tokens"),
        (wrong(num_tokens=2**31 - 1), "tokens"),
        (wrong(token_start=2**31 - 1, num_tokens=2**31 - 1), "tokens"),
        (wrong(num_tokens=3), "bytes"),  # a truncated range
        (wrong(data=b"x" * 100), "bytes"),  # cut
        (wrong(data=b""), "bytes"),
        (wrong(data=b"x" * (1 << 20)), "bytes"),
    ],
)
async def test_a_wrong_chunk_ends_the_transfer_and_touches_nothing(
    spoil: Callable[[Chunk], None], named: str
) -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        assert attempt.ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, attempt.ticket))
        stray = chunk(attempt.ticket, 0, 0, 4)
        spoil(stray)
        ack = await stream.ask(Push(chunk=stray))
        assert ack.status == Ack.STATUS_REFUSED
        assert named in ack.reason
        assert worker.load().kv_chunks_refused == 1
        assert all(not bool(layer.k.any()) for layer in worker.server.node.cache.layers)
        # The ticket lives on: a clean transfer gives the right answer.
        await worker.until(lambda load: load.transferring == 0)
        again = Stream(worker)
        ticket = attempt.ticket
        await again.ok(begin(worker, ticket), *(Push(chunk=c) for c in all_chunks(ticket)))
        await again.ok(commit(ticket))
        assert await decoded(attempt) == MODEL.expected(PROMPT, 16)[1:]
        await worker.until_idle()


async def test_nothing_commits_before_every_row_of_every_layer_is_there() -> None:
    async with running_worker("decode") as worker:
        for skipped in range(6):
            attempt = await reserved(worker)
            ticket = attempt.ticket
            assert ticket is not None
            stream = Stream(worker)
            await stream.ok(begin(worker, ticket))
            chunks = all_chunks(ticket)
            lost = chunks.pop(skipped)
            await stream.ok(*(Push(chunk=c) for c in chunks))
            ack = await stream.ask(commit(ticket))
            assert ack.status == Ack.STATUS_REFUSED
            assert f"layer {lost.layer}, token {lost.token_start} " in ack.reason
            attempt.close()
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, ticket), *(Push(chunk=c) for c in all_chunks(ticket)))
        assert (await stream.ask(commit(ticket, 1))).status == Ack.STATUS_REFUSED
        attempt.close()
        await worker.until_idle()


async def test_a_cut_stream_fails_the_transfer_and_frees_nothing() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, ticket), Push(chunk=chunk(ticket, 0, 0, 4)))
        second = Stream(worker)
        ack = await second.ask(begin(worker, ticket))  # while the first one writes
        assert ack.status == Ack.STATUS_REFUSED
        stream.call.cancel()
        await worker.until(lambda load: load.kv_transfers_failed == 1)
        assert worker.load().held_blocks == 3
        attempt.close()
        await worker.until_idle()


async def test_a_stray_chunk_of_an_old_epoch_leaves_the_new_owner_alone() -> None:
    async with running_worker("decode", num_blocks=7) as worker:  # the pool is one request
        old = await reserved(worker, "old")
        assert old.ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, old.ticket), Push(chunk=chunk(old.ticket, 0, 0, 4)))
        blocks = blocks_of(worker, old.ticket)
        old.close()
        await worker.until(lambda load: load.held_blocks == 0)

        new = await reserved(worker, "new")
        ticket = new.ticket
        assert ticket is not None
        landing = Stream(worker)
        await landing.ok(begin(worker, ticket), *(Push(chunk=c) for c in all_chunks(ticket)))
        assert blocks_of(worker, ticket) == blocks
        before = [
            t.clone() for layer in worker.server.node.cache.layers for t in (layer.k, layer.v)
        ]
        late = chunk(old.ticket, 1, 0, 4)
        late.data = b"\x11" * len(late.data)
        late.crc32c = crc32c(late.data)
        ack = await stream.ask(Push(chunk=late))
        assert ack.status == Ack.STATUS_REFUSED
        after = [t for layer in worker.server.node.cache.layers for t in (layer.k, layer.v)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        await landing.ok(commit(ticket))
        assert await decoded(new) == MODEL.expected(PROMPT, 16)[1:]
        await worker.until_idle()


async def test_a_chunk_checked_but_not_yet_written_cannot_reach_the_next_owner() -> None:
    async with running_worker("decode", num_blocks=7) as worker:  # the pool is one request
        node = worker.server.node
        old = await reserved(worker, "old")
        assert old.ticket is not None
        stream = Stream(worker)
        await stream.ok(begin(worker, old.ticket))
        blocks = blocks_of(worker, old.ticket)
        hold = threading.Event()
        held = node.pager._executor.submit(hold.wait, 20)
        await stream.call.write(Push(chunk=chunk(old.ticket, 0, 0, 4)))
        async with asyncio.timeout(20):
            while node.pager._executor._work_queue.empty():  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.005)
        old.close()
        await worker.until(lambda load: load.held_blocks == 0)
        new = await reserved(worker, "new")
        ticket = new.ticket
        assert ticket is not None
        landing = Stream(worker)
        await landing.ok(begin(worker, ticket))
        assert blocks_of(worker, ticket) == blocks  # the same have their next owner
        hold.set()
        assert held.result(20)
        assert (await stream.call.read()).status == Ack.STATUS_REFUSED
        assert all(not bool(layer.k.any()) for layer in node.cache.layers)
        await landing.ok(*(Push(chunk=c) for c in all_chunks(ticket)), commit(ticket))
        assert await decoded(new) == MODEL.expected(PROMPT, 16)[1:]
        await worker.until_idle()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"weights": "int4-g64+float32"}, "weights"),
        ({"protocol_version": 99}, "protocol_version"),
        ({"num_tokens": 9}, "num_tokens"),
        ({"num_tokens": 2**31 - 1}, "num_tokens"),
        ({"layout.num_layers": 4}, "layout.num_layers"),
        ({"layout.num_kv_heads": 1}, "layout.num_kv_heads"),
        ({"layout.head_dim": 8}, "layout.head_dim"),
        ({"layout.dtype": "bfloat16"}, "layout.dtype"),
        ({"ticket.epoch": 1}, "ticket.epoch"),
        ({"ticket.worker_id": "decode-restarted"}, "ticket.worker_id"),
        ({"ticket.key.attempt": 9}, "ticket.key"),
        ({"ticket.key.request_id": "other"}, "ticket.key"),
        ({"layout.block_size": 128}, None),
    ],
)
async def test_begin_is_refused_naming_the_field(
    changes: dict[str, object], named: str | None
) -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        assert attempt.ticket is not None
        push = begin(worker, attempt.ticket)
        for path, value in changes.items():
            *parents, name = path.split(".")
            message: Any = push.begin
            for parent in parents:
                message = getattr(message, parent)
            setattr(message, name, value)
        ack = await Stream(worker).ask(push)
        if named is None:
            assert ack.status == Ack.STATUS_OK
        else:
            assert ack.status == Ack.STATUS_REFUSED
            assert f"begin: {named}" in ack.reason
            assert worker.load().held_blocks == 0
        attempt.close()
        await worker.until_idle()


async def test_messages_out_of_turn_are_refused() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        for push in (Push(chunk=chunk(ticket, 0, 0, 4)), commit(ticket), Push()):
            assert (await Stream(worker).ask(push)).status == Ack.STATUS_REFUSED
        twice = Stream(worker)
        await twice.ok(begin(worker, ticket))
        assert (await twice.ask(begin(worker, ticket))).status == Ack.STATUS_REFUSED
        attempt.close()
        await worker.until_idle()


async def test_the_sender_repeats_damaged_chunks_and_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_pair() as pair:
        read = pair.p.server.node.pager.read
        bad = 2

        async def damaging(*args: Any) -> int:  # noqa: ANN401  # passed on as they came
            nonlocal bad
            crc = await read(*args)
            bad -= 1
            return crc ^ 1 if bad >= 0 else crc

        monkeypatch.setattr(pair.p.server.node.pager, "read", damaging)
        answer = await Attempt(pair, PROMPT, sampling(16)).run()
        assert answer == MODEL.expected(PROMPT, 16)
        assert pair.d.load().kv_chunks_refused == 2

        bad = 1000
        attempt = Attempt(pair, PROMPT, sampling(16))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert "arrived damaged" in event.handoff_failed.reason
        attempt.close()
        await pair.until_idle()


async def test_a_refusal_reaches_the_router_with_its_reason() -> None:
    async with running_pair(p={"fingerprint": "another"}) as pair:
        attempt = Attempt(pair, PROMPT, sampling(16))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert event.handoff_failed.decode_lost
        assert "model_fingerprint" in event.handoff_failed.reason
        attempt.close()
        await pair.until_idle()
