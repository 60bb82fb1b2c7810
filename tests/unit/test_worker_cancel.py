"""The cancel table: whoever goes away, in whatever state, every block comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from fake_engine import VOCAB_SIZE, fake_config
from worker_pair import Attempt, Pair, Worker, running_pair, running_worker, sampling

from legato.worker.handoff import lanes, link, transfer
from legato.worker.lifecycle import Phase

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache

PHASES = ("queued", "prefilling", "handing off", "decoding", "over")
BIG = fake_config(num_kv_heads=4, head_dim=256)  # 8 KiB a row and layer: many chunks soon


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


async def canary(pair: Pair) -> None:
    """A known answer, and a request that needs 90 % of both pools."""
    answer = await Attempt(pair, prompt_of(11), sampling(16), request_id="canary").run()
    assert answer == pair.p.model.expected(prompt_of(11), 16)
    total = min(pair.p.load().total_blocks, pair.d.load().total_blocks)
    big = prompt_of(total * 4 * 9 // 10)
    assert await Attempt(pair, big, sampling(2), request_id="big").run() == (
        pair.p.model.expected(big, 2)
    )
    await pair.until_idle()


async def test_cancelled_while_queued_is_never_prefilled() -> None:
    async with running_pair() as pair:
        pair.p.model.go.clear()
        busy = Attempt(pair, prompt_of(16), sampling(1))
        busy.start_prefill()
        await pair.p.until(lambda load: load.running == 1)
        queued = [Attempt(pair, prompt_of(16, i), sampling(1)) for i in range(20)]
        for attempt in queued:
            attempt.start_prefill()
        await pair.p.until(lambda load: load.waiting_tokens == 21 * 16)
        for attempt in queued[:-1]:
            attempt.close()
        await pair.p.until(lambda _: pair.p.server._lifecycle.num_calls == 2)
        pair.p.model.go.set()
        await busy.first_token()
        await queued[-1].first_token()
        assert pair.p.load().prefill_tokens == 32
        await pair.until_idle()
        await canary(pair)


async def test_cancelled_between_two_prefill_chunks() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(100), sampling(5))
        await attempt.reserve()
        pair.p.model.go.clear()
        attempt.start_prefill()
        await pair.p.until(lambda load: load.running == 1 and load.held_blocks == 25)
        attempt.close()
        await pair.p.until(lambda _: pair.p.server._lifecycle.num_calls == 0)
        pair.p.model.go.set()
        await pair.until_idle()
        assert pair.p.load().prefill_tokens == 16  # the chunk that was under way, no other
        await canary(pair)


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of BIG takes several."""
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(lanes, name, 1 << 20)


@pytest.mark.usefixtures("many_chunks")
async def test_cancelled_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(config=BIG) as pair:
        attempt = Attempt(pair, prompt_of(200), sampling(5))
        gate = asyncio.Event()
        write = pair.d.server.node.pager.write

        async def slow_write(*args: object) -> None:
            if pair.d.load().kv_bytes_received:
                await gate.wait()
            await write(*args)  # type: ignore[arg-type]  # passed on as they came

        monkeypatch.setattr(pair.d.server.node.pager, "write", slow_write)
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        await pair.d.until(lambda load: load.kv_bytes_received > 0 and load.transferring == 1)
        assert pair.d.load().held_blocks == 51
        attempt.close()
        gate.set()
        await pair.until_idle()
        assert pair.d.load().kv_transfers_completed == 0
        assert pair.p.load().kv_transfers_failed == 1
        await canary(pair)


async def test_cancelled_after_the_transfer_and_before_start() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(20), sampling(5))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        assert (await attempt.handoff()).WhichOneof("event") == "handoff_done"
        assert pair.d.load().held_blocks == 6
        attempt.close()
        await pair.until_idle()
        assert pair.d.load().decode_steps == 0
        await canary(pair)


async def test_cancelled_after_start_and_before_the_transfer() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(20), sampling(5))
        await attempt.reserve()
        attempt.tokens.append(1)
        await attempt.start_decode()
        assert pair.d.load().reserved_blocks == 6
        attempt.close()
        await pair.until_idle()
        await canary(pair)


async def test_cancelled_in_the_middle_of_decode() -> None:
    async with running_pair() as pair:
        pair.d.model.go.clear()
        attempt = Attempt(pair, prompt_of(20), sampling(100))
        run = asyncio.create_task(attempt.run())
        await pair.d.until(lambda load: load.running == 1)
        run.cancel()
        attempt.close()
        await pair.d.until(lambda _: pair.d.server._lifecycle.num_calls == 0)
        assert pair.d.load().held_blocks == 6  # the step under way still reads them
        pair.d.model.go.set()
        await pair.until_idle()
        assert pair.d.load().decode_steps == 1
        await canary(pair)


async def test_a_vanished_client_frees_like_a_cancel() -> None:
    async with running_pair(d={"num_blocks": 128}) as pair:
        attempt = Attempt(pair, prompt_of(20), sampling(400))
        run = asyncio.create_task(attempt.run())
        await pair.d.until(lambda load: load.decode_steps > 3)
        await pair.d.channel.close()  # no cancel is sent for the call: the connection ends
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await run
        await pair.until_idle()


def phase_of(attempt: Attempt, run: asyncio.Task[list[int]]) -> str:
    """Where an attempt is, as its driver sees it."""
    if run.done():
        return "over"
    if attempt.first is not None:
        decoding = len(attempt.tokens) > len(attempt.prompt) + 1
        return "decoding" if decoding else "handing off"
    return "queued" if attempt.prefill_call is None else "prefilling"


def slow_down(worker: Worker, step_s: float) -> None:
    """Each step takes at least so long: phases then last long enough to be hit."""
    forward = worker.model.forward

    def slow(batch: ForwardBatch, cache: KvCache) -> Tensor:
        time.sleep(step_s)
        return cast("Tensor", forward(batch, cache))

    worker.model.forward = slow


async def test_cancels_at_random_moments_leak_nothing() -> None:
    dice = random.Random(7)
    hits: Counter[str] = Counter()
    asked = received = 0  # tokens of decode steps
    async with running_pair(p={"num_blocks": 128}, d={"num_blocks": 128}) as pair:
        slow_down(pair.p, 0.003)
        slow_down(pair.d, 0.003)

        async def one(number: int) -> None:
            nonlocal asked, received
            prompt = prompt_of(dice.randrange(1, 60), number)
            max_tokens = dice.choice((2, 80))
            attempt = Attempt(pair, prompt, sampling(max_tokens, ignore_eos=True))
            run = asyncio.create_task(attempt.run())
            await asyncio.sleep(dice.random() * 0.3)
            hits[phase_of(attempt, run)] += 1
            if attempt.first is not None:
                asked += max_tokens - 1
                received += len(attempt.tokens) - len(prompt) - 1
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            attempt.close()

        for batch in range(4):
            await asyncio.gather(*(one(batch * 25 + i) for i in range(25)))
        await pair.until_idle()
        assert hits.keys() == set(PHASES), f"some moments were never hit: {hits}"
        made = pair.d.load().decode_tokens
        assert made < (received + asked) / 2, f"{made=}: {received} came of {asked}, then cancels"
        await canary(pair)


async def test_decode_worker_lost_before_the_transfer_is_reported() -> None:
    async with running_worker("prefill") as p:
        async with running_worker("decode") as lost:
            pair = Pair(p, lost)
            attempt = Attempt(pair, prompt_of(20), sampling(5))
            await attempt.reserve()
            address = lost.address
            await lost.server.stop(0)
        attempt.start_prefill(address)
        await attempt.first_token()
        event = await attempt.handoff()
        assert event.handoff_failed.decode_lost
        assert "UNAVAILABLE" in event.handoff_failed.reason
        await p.until_idle()
        async with running_worker("decode") as other:
            await canary(Pair(p, other))


@pytest.mark.usefixtures("many_chunks")
async def test_decode_worker_lost_in_the_middle_of_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_worker("prefill", config=BIG) as p:
        async with running_worker("decode", config=BIG) as d:
            attempt = Attempt(Pair(p, d), prompt_of(200), sampling(5))
            begun = asyncio.Event()

            async def stuck(*_: object) -> None:
                begun.set()
                await asyncio.sleep(60)

            monkeypatch.setattr(d.server.node.pager, "write", stuck)
            await attempt.reserve()
            attempt.start_prefill()
            await attempt.first_token()
            await asyncio.wait_for(begun.wait(), 20)
            await d.server.stop(0)
            event = await attempt.handoff()
            assert event.handoff_failed.decode_lost
        await p.until_idle()


async def test_a_receiver_that_answers_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(transfer, "PATIENCE_S", 0.2)
    async with running_pair() as pair:

        async def stuck(*_: object) -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(pair.d.server.node.pager, "write", stuck)
        attempt = Attempt(pair, prompt_of(20), sampling(5))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert event.handoff_failed.decode_lost
        assert "answered no frame" in event.handoff_failed.reason
        attempt.close()
        await pair.until_idle()


@pytest.mark.usefixtures("many_chunks")
async def test_prefill_worker_lost_in_the_middle_of_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_worker("decode", config=BIG) as d:
        async with running_worker("prefill", config=BIG) as p:
            attempt = Attempt(Pair(p, d), prompt_of(200), sampling(5))
            read = p.server.node.pager.read
            sent = 0

            async def stalls(*args: object) -> int:
                nonlocal sent
                sent += 1
                if sent > 2:
                    await asyncio.sleep(60)
                return await read(*args)  # type: ignore[arg-type]  # passed on as they came

            monkeypatch.setattr(p.server.node.pager, "read", stalls)
            await attempt.reserve()
            attempt.start_prefill()
            await attempt.first_token()
            await attempt.start_decode()
            await d.until(lambda load: load.kv_bytes_received > 0)
            await p.server.stop(0)
        await d.until(lambda load: load.kv_transfers_failed == 1)
        assert d.load().held_blocks == 51  # the Decode call's, until it ends
        attempt.close()
        await d.until_idle()
        assert d.load().decode_steps == 0
        async with running_worker("prefill", config=BIG) as other:
            await canary(Pair(other, d))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_failed_engine_ends_every_call_and_the_process(role: str) -> None:
    exits: list[str] = []
    settings = {"exits": exits}
    async with running_pair(**{role[0]: settings}) as pair:  # type: ignore[arg-type]  # p or d
        worker = pair.p if role == "prefill" else pair.d
        waiting = Attempt(pair, prompt_of(8), sampling(5), request_id="waiting")
        await waiting.reserve()
        waiting.tokens.append(1)
        await waiting.start_decode()
        worker.model.failure = RuntimeError("out of memory")
        attempt = Attempt(pair, prompt_of(9), sampling(5))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await attempt.run()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.server.phase is Phase.DEAD
        if role == "decode":
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await waiting.decode_call.read()
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        await worker.until(lambda _: bool(exits))
        attempt.close()
        waiting.close()


async def test_a_hanging_engine_is_found_by_the_watchdog() -> None:
    exits: list[str] = []
    async with running_worker("prefill", exits=exits, step_timeout_s=0.01) as worker:
        worker.model.go.clear()
        attempt = Attempt(Pair(worker, worker), prompt_of(2), sampling(1))
        attempt.start_prefill()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await attempt.first_token()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "limit" in (failed.value.details() or "")
        await worker.until(lambda _: bool(exits))
        worker.model.go.set()
