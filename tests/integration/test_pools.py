"""Capacity: requests that never fit, a full decode pool, a queue that moves."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from local_service import LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

# 3 layers × 2 (K, V) × 2 KV heads × 16 × 4 bytes
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")


def pool(tokens: int) -> list[str]:
    return ["--kv-memory", str(tokens * BYTES_PER_TOKEN)]


async def test_what_never_fits_is_refused_at_once_and_blocks_nobody(folder: Path) -> None:
    oracle = load_oracle(folder)
    async with LocalService(folder, prefill_args=pool(512), decode_args=pool(256)) as service:
        for prompt_tokens, max_tokens in ((300, 10), (250, 100), (256, 2), (300, None)):
            started = time.monotonic()
            sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(
                    service.generation.Generate(
                        request([7] * prompt_tokens, **sampling), timeout=20
                    )
                )
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "256" in (error.value.details() or "")
            assert time.monotonic() - started < 1
        # The documented edge: prompt + max_tokens - 1 rows fit exactly.
        for prompt_tokens, max_tokens in ((256, 1), (255, 2), (240, 17)):
            prompt = [(i * 31) % 256 for i in range(prompt_tokens)]
            answer = await collect(
                service.generation.Generate(
                    request(prompt, max_tokens=max_tokens, ignore_eos=True), timeout=30
                )
            )
            assert answer.token_ids == greedy(oracle, prompt, max_tokens)
        await service.wait_idle()
        prefill_tokens = sum(load.prefill_tokens for _, load in await service.loads())
        assert prefill_tokens == 256 + 255 + 240, "a refused request was prefilled"


async def test_forty_requests_through_small_pools_all_finish(folder: Path) -> None:
    """Prefill has room for 4 prompts, decode for 2 sequences (case B14)."""
    oracle = load_oracle(folder)
    prompts = [[(i * 17 + j * 29) % 256 for j in range(40)] for i in range(40)]
    async with LocalService(
        folder,
        prefill_args=[*pool(4 * 48), "--prefill-chunk-tokens", "16"],
        decode_args=pool(2 * 80),
    ) as service:
        answers = await asyncio.gather(
            *(
                collect(
                    service.generation.Generate(
                        request(prompt, max_tokens=40, ignore_eos=True), timeout=120
                    )
                )
                for prompt in prompts
            )
        )
        await service.wait_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == greedy(oracle, prompt, 40)
        assert answer.done.timings.prefill_forwards >= 3


async def test_a_big_request_does_not_hold_up_small_ones_nor_starve(folder: Path) -> None:
    async with LocalService(folder, prefill_args=pool(512), decode_args=pool(256)) as service:

        async def ask(prompt: list[int], max_tokens: int) -> float:
            await collect(
                service.generation.Generate(
                    request(prompt, max_tokens=max_tokens, ignore_eos=True), timeout=60
                )
            )
            return time.monotonic()

        running = asyncio.create_task(ask([1] * 20, 100))
        await asyncio.sleep(0.05)
        big = asyncio.create_task(ask([2] * 190, 14))
        await asyncio.sleep(0.02)
        small = [asyncio.create_task(ask([3 + i] * 8, 8)) for i in range(20)]
        ended = await asyncio.gather(running, big, *small)
        assert len(ended) == 22
        await service.wait_idle()


async def test_a_slow_queue_honours_deadlines_without_prefill(folder: Path) -> None:
    async with LocalService(folder, prefill_args=pool(512), decode_args=pool(480)) as service:
        blocker = service.generation.Generate(
            request([1] * 28, max_tokens=450, ignore_eos=True), timeout=60
        )
        await blocker.read()
        before = sum(load.prefill_tokens for _, load in await service.loads())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(
                service.generation.Generate(
                    request([2] * 60, max_tokens=60, ignore_eos=True), timeout=0.04
                )
            )
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        blocker.cancel()
        await service.wait_idle()
        after = sum(load.prefill_tokens for _, load in await service.loads())
        assert after == before
