"""Answers that have to yield their room and go on: over fake workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import SEED, FakeWorker
from router_service import Service, ask, check_whole, collect, collect_all, until

if TYPE_CHECKING:
    from legato.protos import generation_pb2


@pytest.mark.parametrize("tokens_per_event", [1, 4])
@pytest.mark.parametrize("leaves_at", [[1], [5], [29], [3, 4, 11]])
async def test_an_answer_that_yields_goes_on_with_the_same_tokens(
    leaves_at: list[int], tokens_per_event: int
) -> None:
    prefill = FakeWorker("prefill")
    decode = FakeWorker("decode", tokens_per_event=tokens_per_event)
    decode.faults.preempt_at = {SEED: list(leaves_at)}
    async with Service([prefill], [decode], max_attempts=1) as service:
        result = await collect(service, ask("hello", 30))
        check_whole(result, "hello", 30)
        timings = result.finish.timings
        assert timings.preemptions == len(leaves_at)
        assert timings.attempts == 1  # it failed nowhere
        assert timings.prefill_forwards == 1 + len(leaves_at)
        # With one token left to generate, it is prefill that gives it.
        begins = [0, *(at for at in leaves_at if at < 29)]
        assert [len(r.token_ids) - 5 for r in decode.reserves] == begins
        assert [r.num_preemptions for r in decode.reserves] == list(range(len(begins)))
        assert len({r.arrival for r in decode.reserves}) == 1
        assert {r.sampling.seed for r in decode.reserves} == {SEED}
        keys = [(r.key.request_id, r.key.attempt) for r in prefill.prefills]
        assert len(set(keys)) == len(keys)
        await service.settle()
        assert service.router.counters.moved == 0
        assert all(not view.failed_requests for view in service.router.pool.views())


@pytest.mark.parametrize("tokens_per_event", [1, 4])
@pytest.mark.parametrize("leaves_at", [[1], [7], [8], [29], [3, 12, 13]])
async def test_an_answer_that_outgrew_prefill_goes_on_with_the_same_tokens(
    leaves_at: list[int], tokens_per_event: int
) -> None:
    """What prefill has no room for comes again in decode, and is told once."""
    prefill = FakeWorker("prefill", total_blocks=3)  # 12 rows: the prompt and 7 tokens
    decode = FakeWorker("decode", tokens_per_event=tokens_per_event)
    decode.faults.preempt_at = {SEED: list(leaves_at)}
    async with Service([prefill], [decode]) as service:
        result = await collect(service, ask("hello", 30))
        check_whole(result, "hello", 30)
        assert result.finish.timings.preemptions == len(leaves_at)
        begins = [0, *(min(at, 7) for at in leaves_at)]
        assert [len(r.token_ids) - 5 for r in prefill.prefills] == begins
        assert [len(r.token_ids) - 5 for r in decode.reserves] == begins
        await service.settle()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_an_answer_that_outgrew_prefill_survives_a_loss(lost: str) -> None:
    prefill = FakeWorker("prefill", total_blocks=2)  # the prompt and 3 tokens
    decode = FakeWorker("decode")
    async with Service([prefill], [decode]) as service:
        if lost == "decode":
            decode.faults.end_at = 9
            reading = asyncio.create_task(collect(service, ask("hello", 30)))
            await until(lambda: len(prefill.prefills) > 1)
            decode.faults.end_at = None
        else:
            decode.faults.preempt_at = {SEED: [9]}
            reading = asyncio.create_task(collect(service, ask("hello", 30)))
            await until(lambda: len(decode.reserves) > 0)
            prefill.faults.fail_prefills = 1
        check_whole(await reading, "hello", 30)
        assert max(len(r.token_ids) for r in prefill.prefills) == 8
        await service.settle()


async def test_swaps_and_returns_are_counted_and_carried() -> None:
    decode = FakeWorker("decode")
    decode.faults.swaps = 2
    decode.faults.preempt_at = {SEED: [4]}
    async with Service([FakeWorker("prefill")], [decode]) as service:
        result = await collect(service, ask("hello", 10))
        check_whole(result, "hello", 10)
        assert [r.num_preemptions for r in decode.reserves] == [0, 3]
        assert result.finish.timings.preemptions == 5  # two swaps, one return, two swaps


async def test_one_that_yields_keeps_its_place_before_later_ones() -> None:
    decode = FakeWorker("decode", total_blocks=16, step_s=0.005)
    decode.faults.preempt_at = {SEED: [10]}
    async with Service([FakeWorker("prefill")], [decode]) as service:
        first = asyncio.create_task(collect(service, ask("a" * 20, 25)))
        await until(lambda: decode.num_tokens_sent > 2)
        later = [asyncio.create_task(collect(service, ask("b" * 40, 20))) for _ in range(2)]
        await until(lambda: service.router.admission.num_queued == 2)
        check_whole(await first, "a" * 20, 25)
        assert decode.reserves[0].arrival == decode.reserves[1].arrival
        for result in await asyncio.gather(*later):
            check_whole(result, "b" * 40, 20)
        await service.settle()


async def test_cancelled_while_it_waits_to_go_on() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    decode.faults.preempt_at = {SEED: [6]}
    decode.faults.refuse_after_preemption = 10**6
    async with Service([prefill], [decode]) as service:
        received: list[generation_pb2.GenerateResponse] = []

        async def read() -> None:
            async for response in service.client.generate(ask("hello", 60)):
                received.append(response)  # noqa: PERF401  # a leaving client keeps what it read

        reading = asyncio.create_task(read())
        await until(lambda: len(decode.reserves) > 2)
        reading.cancel()
        await service.settle()
        assert [len(r.delta.token_ids) for r in received] == [1] * 6
        assert len(prefill.prefills) == 1  # nothing was computed for nobody
        assert service.router.counters.cancelled == 1


async def test_a_deadline_that_passes_while_answers_wait_to_go_on() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    decode.faults.preempt_at = {SEED: [6], SEED + 1: [9]}
    decode.faults.refuse_after_preemption = 10**6
    async with Service([prefill], [decode]) as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect_all(service, ask("hello", 30, n=2), timeout_s=0.5)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.settle()
        assert len(prefill.prefills) == 1
