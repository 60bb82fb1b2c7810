"""Colocated workers behind the router: alone, beside a pair, and where they are lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Service, ask, check_whole, collect, collect_all, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def colocated(
    *workers: FakeWorker,
    pair: tuple[FakeWorker, FakeWorker] | None = None,
    **options: Any,  # noqa: ANN401  # of RouterOptions
) -> AsyncIterator[Service]:
    prefills, decodes = ([pair[0]], [pair[1]]) if pair is not None else ([], [])
    async with Service(prefills, [*decodes, *workers], **options) as service:
        await service.client.wait_ready(5)
        await until(lambda: len(service.router.pool.placeable("colocated")) == len(workers))
        yield service


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
async def test_one_worker_serves_it_all(num_tokens: int) -> None:
    worker = FakeWorker("colocated", total_blocks=128)
    async with colocated(worker) as service:
        prompt = "x" * 300  # far beyond what a decode worker computes itself
        result = await collect(service, ask(prompt, num_tokens))
        check_whole(result, prompt, num_tokens)
        timings = result.finish.timings
        assert timings.prefill_worker == worker.worker_id
        assert timings.decode_worker == (worker.worker_id if num_tokens > 1 else "")
        assert timings.attempts == 1
        assert timings.decode_forwards == num_tokens - 1
        assert timings.kv_bytes_handed_over == 0
        assert [start.local_prefill for start in worker.starts] == [True]
        await service.settle()


async def test_several_answers_go_one_by_one_and_the_others_behind_the_first_token() -> None:
    worker = FakeWorker("colocated", prefill_s=0.1)
    async with colocated(worker) as service:
        request = ask("hello there", 12)
        request.n = 3
        answering = asyncio.create_task(collect_all(service, request))
        await until(lambda: len(worker.starts) == 1)
        await asyncio.sleep(0.05)
        assert len(worker.reserves) == 1, "the prompt is computed once, then it is cached"
        results = await answering
        for index, result in enumerate(results):
            check_whole(result, "hello there", 12, index)
            assert result.finish.timings.attempts == 1
        assert [r.num_answers for r in worker.reserves] == [1, 1, 1]
        assert [r.sampling.seed - worker.reserves[0].sampling.seed for r in worker.reserves] == [
            0,
            1,
            2,
        ]
        await service.settle()


async def test_several_answers_of_one_token() -> None:
    async with colocated(FakeWorker("colocated")) as service:
        request = ask("hello", 1)
        request.n = 3
        for index, result in enumerate(await collect_all(service, request)):
            check_whole(result, "hello", 1, index)
        await service.settle()


async def test_several_answers_whose_worker_dies_before_the_first_token_go_on_on_another() -> None:
    dying, other = FakeWorker("colocated", prefill_s=5.0), FakeWorker("colocated")
    async with colocated(dying) as service:
        request = ask("hello", 8)
        request.n = 3
        answering = asyncio.create_task(collect_all(service, request))
        await until(lambda: len(dying.starts) == 1)
        service.decodes.append(other)
        await service.router.set_workers([*service.endpoints, await other.start()])
        await dying.die()
        for index, result in enumerate(await answering):
            check_whole(result, "hello", 8, index)
        await service.settle()


async def test_a_lost_worker_s_streams_are_replayed_on_another_or_on_the_pair() -> None:
    for others in ("colocated", "pair"):
        dying = FakeWorker("colocated", step_s=0.02)
        async with colocated(dying) as service:
            running = asyncio.create_task(collect(service, ask("hello", 40)))
            await until(lambda d=dying: d.open_calls == 1 and len(d.starts) == 1)  # type: ignore[misc]  # bound now
            await asyncio.sleep(0.1)
            roles = ["colocated"] if others == "colocated" else ["prefill", "decode"]
            more = [FakeWorker(role) for role in roles]  # type: ignore[arg-type]  # literals
            service.decodes += more
            endpoints = [await worker.start() for worker in more]
            await service.router.set_workers([*service.endpoints, *endpoints])
            await dying.die()
            result = await running
            check_whole(result, "hello", 40)
            assert result.finish.timings.attempts == 2
            assert result.finish.timings.decode_worker == more[-1].worker_id
            await service.settle()


async def test_a_pair_s_streams_are_replayed_on_a_colocated_worker() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", step_s=0.02)
    worker = FakeWorker("colocated")
    async with colocated(worker, pair=(prefill, decode)) as service:
        running = asyncio.create_task(collect(service, ask("hello", 40)))
        await until(lambda: len(decode.starts) == 1)
        await decode.die()
        result = await running
        check_whole(result, "hello", 40)
        assert result.finish.timings.decode_worker == worker.worker_id
        assert service.router.ready, "the pair is gone, and a colocated worker serves"
        await service.settle()


async def test_beside_a_pair_it_takes_what_is_measured_to_be_cheaper_there() -> None:
    prefill, decode, worker = (FakeWorker(r) for r in ("prefill", "decode", "colocated"))  # type: ignore[arg-type]  # literals
    async with colocated(worker, pair=(prefill, decode)) as service:
        check_whole(await collect(service, ask("first", 3)), "first", 3)
        assert len(prefill.prefills) == 1, "nothing is measured yet: the pair"
        worker.local_prefill_token_s = 1e-9
        view = service.router.pool.view(worker.worker_id)
        assert view is not None
        await until(lambda: view.load is not None and view.load.local_prefill_token_s > 0)
        check_whole(await collect(service, ask("cheap", 3)), "cheap", 3)
        assert (len(prefill.prefills), len(worker.starts)) == (1, 1)
        worker.local_prefill_token_s = 1e9
        await until(lambda: view.load is not None and view.load.local_prefill_token_s > 1)
        check_whole(await collect(service, ask("dear", 3)), "dear", 3)
        assert (len(prefill.prefills), len(worker.starts)) == (2, 1)
        await service.settle()


async def test_where_the_pair_has_no_room_the_colocated_worker_has() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", total_blocks=4, step_s=0.05)
    worker = FakeWorker("colocated")
    async with colocated(worker, pair=(prefill, decode)) as service:
        prompts = ["a" * 40, "b" * 40]
        results = await asyncio.gather(*(collect(service, ask(p, 10)) for p in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            check_whole(result, prompt, 10)
        assert len(worker.starts) >= 1
        await service.settle()


async def test_a_refused_reserve_waits_for_the_worker_s_room() -> None:
    worker = FakeWorker("colocated")
    worker.faults.refuse_reserves = 2
    async with colocated(worker) as service:
        check_whole(await collect(service, ask("hello", 5)), "hello", 5)
        assert len(worker.reserves) == 3
        await service.settle()


async def test_cancelled_it_holds_nothing() -> None:
    worker = FakeWorker("colocated", prefill_s=5.0)
    async with colocated(worker) as service:
        request = ask("hello", 50)
        request.n = 2
        running = asyncio.create_task(collect_all(service, request))
        await until(lambda: len(worker.starts) == 1)
        running.cancel()
        await service.settle()


async def test_without_a_worker_the_words_name_the_colocated_pool() -> None:
    worker = FakeWorker("colocated")
    async with colocated(worker, worker_wait_s=0.2) as service:
        check_whole(await collect(service, ask("hello", 3)), "hello", 3)
        await worker.die()
        await until(lambda: not service.router.ready)
        assert service.router.missing() == "no ready worker in the colocated pool"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 3), None)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the colocated pool has had no ready worker for" in (raised.value.details() or "")


async def test_what_no_worker_can_hold_is_refused() -> None:
    large, small = FakeWorker("colocated", prefill_s=5.0), FakeWorker("colocated", total_blocks=4)
    async with colocated(large, small) as service:
        model = await service.client.model()
        assert model.prefill_kv_tokens == model.decode_kv_tokens == 256
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("x" * 60, 250))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        running = asyncio.create_task(collect(service, ask("x" * 60, 50)))
        await until(lambda: len(large.starts) == 1)
        await large.die()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no colocated worker can hold this request" in (raised.value.details() or "")
