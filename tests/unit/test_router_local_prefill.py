"""Short rests of prompts that the decode worker computes itself: over fake workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Result, Service, ask, collect, collect_all, expected, until

from legato.protos import common_pb2


def near(**how: float) -> FakeWorker:
    """A decode worker at which a token costs next to nothing."""
    decode = FakeWorker("decode", **how)  # type: ignore[arg-type]  # numbers, each of its kind
    decode.local_prefill_token_s = 1e-9
    return decode


async def measured(service: Service) -> None:
    """One request goes the remote way: the router knows what that costs."""
    assert (await collect(service, ask("first", 3))).token_ids == expected("first", 3)
    assert len(service.prefills[0].prefills) == 1


def check_local(result: Result, decode: FakeWorker, prompt: str, num_tokens: int) -> None:
    assert result.token_ids == expected(prompt, num_tokens)
    assert result.text == "".join(map(chr, result.token_ids))
    timings = result.finish.timings
    assert timings.attempts == 1
    assert timings.prefill_worker == decode.worker_id
    assert timings.prefill_forwards == 1
    assert timings.decode_forwards == num_tokens - 1
    assert timings.kv_bytes_handed_over == timings.kv_transfer_s == 0
    assert timings.prefill_model_s == 0.002
    assert timings.prefill_wait_s == 0.001


async def test_a_short_prompt_stays_on_the_decode_worker_once_that_is_known_to_be_cheap() -> None:
    prefill, decode = FakeWorker("prefill"), near()
    decode.cached_tokens = 2
    async with Service([prefill], [decode], local_prefill_tokens=128) as service:
        await measured(service)
        result = await collect(service, ask("hello", 9))
        check_local(result, decode, "hello", 9)
        assert result.finish.timings.decode_worker == decode.worker_id
        assert result.finish.usage.cached_prompt_tokens == 2
        assert result.finish.timings.kv_tokens_written == (5 - 2) + (9 - 1)
        assert len(prefill.prefills) == 1
        assert [s.local_prefill for s in decode.starts] == [False, True]
        await service.settle()


@pytest.mark.parametrize("reason", ["off", "long", "dear", "several", "one token"])
async def test_what_goes_to_prefill_all_the_same(reason: str) -> None:
    prefill, decode = FakeWorker("prefill"), near()
    limit = {"off": 0, "long": 4}.get(reason, 128)
    if reason == "dear":
        decode.local_prefill_token_s = 100.0
    async with Service([prefill], [decode], local_prefill_tokens=limit) as service:
        await measured(service)
        if reason == "several":
            for number, result in enumerate(await collect_all(service, ask("hello", 4, n=2))):
                assert result.token_ids == expected("hello", 4, number)
        else:
            num_tokens = 1 if reason == "one token" else 4
            result = await collect(service, ask("hello", num_tokens))
            assert result.token_ids == expected("hello", num_tokens)
        assert len(prefill.prefills) == 2
        assert not any(start.local_prefill for start in decode.starts)
        await service.settle()


async def test_only_the_rest_that_is_not_cached_counts() -> None:
    prefill, decode = FakeWorker("prefill"), near()
    async with Service([prefill], [decode], local_prefill_tokens=8) as service:
        await measured(service)
        decode.cached_tokens = 12
        check_local(await collect(service, ask("h" * 20, 5)), decode, "h" * 20, 5)
        decode.cached_tokens = 11
        result = await collect(service, ask("h" * 20, 5))
        assert result.finish.timings.prefill_worker == prefill.worker_id


async def test_the_prefill_worker_is_free_for_others_meanwhile() -> None:
    prefill, decode = FakeWorker("prefill", total_blocks=2), near()
    async with Service([prefill], [decode], local_prefill_tokens=8) as service:
        await measured(service)
        decode.prefill_s = 60.0
        reading = asyncio.create_task(collect(service, ask("hello", 5)))
        await until(lambda: decode.starts[-1].local_prefill)
        [view] = service.router.pool.placeable("prefill")
        assert (view.used_blocks, view.backlog_tokens) == (0, 0)
        reading.cancel()
        await service.settle()


@pytest.mark.parametrize("end", ["eos", "stop string"])
async def test_a_first_token_that_is_the_last(end: str) -> None:
    prefill, decode = FakeWorker("prefill"), near()
    async with Service([prefill], [decode], local_prefill_tokens=128) as service:
        await measured(service)
        [first] = expected("hello", 1)
        stop = []
        if end == "eos":
            decode.eos_at = 0
        else:
            stop = [chr(first)]
        result = await collect(service, ask("hello", 9, stop=stop))
        assert result.token_ids == [first]
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_STOP
        assert result.finish.stop_reason == chr(first)
        await service.settle()


async def test_the_worker_lost_while_it_computes_means_another_attempt() -> None:
    prefill, decodes = FakeWorker("prefill"), [near(), near()]
    async with Service([prefill], decodes, local_prefill_tokens=128) as service:
        await measured(service)
        for worker in decodes:
            worker.prefill_s = 60.0
        reading = asyncio.create_task(collect(service, ask("hello", 9)))
        await until(lambda: any(s.local_prefill for w in decodes for s in w.starts))
        victim = next(w for w in decodes if any(s.local_prefill for s in w.starts))
        other = next(w for w in decodes if w is not victim)
        other.prefill_s = 0.0
        await victim.die()
        result = await reading
        assert result.token_ids == expected("hello", 9)
        assert (result.finish.timings.attempts, result.finish.timings.retargets) == (2, 0)
        assert len(prefill.prefills) == 1
        await service.settle()


async def test_preempted_after_a_local_prefill_it_goes_on_with_the_same_tokens() -> None:
    prefill, decode = FakeWorker("prefill"), near()
    async with Service([prefill], [decode], local_prefill_tokens=128) as service:
        await measured(service)
        decode.faults.preempt_at = {3: [4]}
        result = await collect(service, ask("hello", 12))
        assert result.token_ids == expected("hello", 12)
        assert result.finish.timings.preemptions == 1
        assert [len(r.token_ids) for r in decode.reserves] == [5, 5, 9]
        assert [s.local_prefill for s in decode.starts] == [False, True, True]
        await service.settle()


@pytest.mark.parametrize("end", ["client", "deadline"])
async def test_whoever_gives_up_during_a_local_prefill_frees_everything(end: str) -> None:
    prefill, decode = FakeWorker("prefill"), near()
    async with Service([prefill], [decode], local_prefill_tokens=128) as service:
        await measured(service)
        decode.prefill_s = 60.0
        timeout_s = 20.0 if end == "client" else 0.3
        reading = asyncio.create_task(collect(service, ask("hello", 9), timeout_s))
        await until(lambda: decode.starts[-1].local_prefill)
        if end == "client":
            reading.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await reading
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.settle()


async def test_local_prefills_are_measured_again_when_the_last_measure_is_old() -> None:
    prefill, decode = FakeWorker("prefill"), near()
    async with Service([prefill], [decode], local_prefill_tokens=128) as service:
        await measured(service)
        for number in range(3):
            await collect(service, ask(f"n{number}", 3))
        assert len(prefill.prefills) == 1
        costs = service.router._costs
        costs._overhead_at -= 31.0
        await collect(service, ask("again", 3))
        assert len(prefill.prefills) == 2
        await collect(service, ask("near again", 3))
        assert len(prefill.prefills) == 2
