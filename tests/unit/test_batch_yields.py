"""Batch answers make room on a decode worker for an interactive request that was refused."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from worker_pair import Attempt, Pair, running_pair, sampling

from legato.protos import common_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache

BATCH_TOKENS = 30


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


def slow_down(pair: Pair, step_s: float) -> None:
    """A decode step takes at least so long: the answer is still there when others come."""
    forward = pair.d.model.forward

    def slow(batch: ForwardBatch, cache: KvCache) -> Tensor:
        time.sleep(step_s)
        return cast("Tensor", forward(batch, cache))

    pair.d.model.forward = slow


@pytest.mark.parametrize("swap_memory_bytes", [None, 0])
async def test_an_interactive_request_gets_the_room_of_a_batch_answer(
    swap_memory_bytes: int | None,
) -> None:
    settings = {"num_blocks": 10, "swap_memory_bytes": swap_memory_bytes}
    async with running_pair(d=settings) as pair:
        slow_down(pair, 0.01)
        prompt = prompt_of(8)
        batch = Attempt(
            pair,
            prompt,
            sampling(BATCH_TOKENS),
            request_id="batch",
            priority=common_pb2.PRIORITY_BATCH,
        )
        running = asyncio.create_task(batch.run())
        await pair.d.until(lambda load: load.running == 1 and load.free_blocks <= 5)
        urgent = Attempt(pair, prompt_of(20, salt=1), sampling(4), request_id="urgent", arrival=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await urgent.reserve_once()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "are available" in (refused.value.details() or "")
        assert await urgent.run() == pair.p.model.expected(urgent.prompt, 4)
        assert not running.done(), "it made room and waits"
        assert await running == pair.p.model.expected(prompt, BATCH_TOKENS)
        load = pair.d.load()
        assert load.preemptions >= 1
        assert load.preemptions_returned == (load.preemptions if swap_memory_bytes == 0 else 0)
        await pair.until_idle()


async def test_a_batch_answer_comes_back_when_the_other_asks_no_more() -> None:
    async with running_pair(d={"num_blocks": 10}) as pair:
        slow_down(pair, 0.01)
        prompt = prompt_of(8)
        batch = Attempt(pair, prompt, sampling(BATCH_TOKENS), priority=common_pb2.PRIORITY_BATCH)
        running = asyncio.create_task(batch.run())
        await pair.d.until(lambda load: load.running == 1 and load.free_blocks <= 5)
        gone = Attempt(pair, prompt_of(30, salt=1), sampling(4), request_id="gone", arrival=1)
        with pytest.raises(grpc.aio.AioRpcError):
            await gone.reserve_once()
        await pair.d.until(lambda load: load.swapped == 1)
        # It was cancelled while it waited; the worker is never told.
        assert await running == pair.p.model.expected(prompt, BATCH_TOKENS)
        assert pair.d.load().preemptions == 1
        await pair.until_idle()


async def test_among_equals_nobody_yields_to_one_that_waits() -> None:
    async with running_pair(d={"num_blocks": 10}) as pair:
        slow_down(pair, 0.002)
        prompt = prompt_of(8)
        first = Attempt(pair, prompt, sampling(BATCH_TOKENS), request_id="first")
        running = asyncio.create_task(first.run())
        await pair.d.until(lambda load: load.running == 1 and load.free_blocks <= 5)
        second = Attempt(pair, prompt_of(20, salt=1), sampling(4), request_id="second", arrival=1)
        assert await second.run() == pair.p.model.expected(second.prompt, 4)
        assert await running == pair.p.model.expected(prompt, BATCH_TOKENS)
        assert pair.d.load().preemptions == 0
        await pair.until_idle()
