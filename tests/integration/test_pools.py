"""Capacity: requests that never fit, a full decode pool, a queue that moves."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from local_service import Answer, LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions

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


def reserving(tokens: int) -> list[str]:
    """A decode pool whose room is promised in full: what is there depends on no guess."""
    return [*pool(tokens), "--admission", "reserve"]


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
            prompt = [(i * 31 + prompt_tokens) % 256 for i in range(prompt_tokens)]
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


async def test_answers_that_have_outgrown_prefill_are_returned_and_finish(folder: Path) -> None:
    """Prefill has room for 64 tokens; the answers get to 160, and decode holds one of them."""
    oracle = load_oracle(folder)
    prompts = [[(i * 31 + j * 7) % 256 for j in range(40)] for i in range(4)]
    decode_args = [*pool(192), "--swap-memory", "0", "--admission-risk", "0.99"]
    async with LocalService(folder, prefill_args=pool(64), decode_args=decode_args) as service:

        async def ask(prompt: list[int], max_tokens: int) -> Answer:
            message = request(prompt, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
            return await collect(service.generation.Generate(message, timeout=60))

        alone = [await ask(prompt, 120) for prompt in prompts]
        for _ in range(40):  # answers were short of late: too many are let in
            await ask([5], 2)
        answers = await asyncio.gather(*(ask(prompt, 120) for prompt in prompts))
        await service.wait_idle()
        assert sum(load.preemptions_returned for _, load in await service.loads()) > 0
    for prompt, before, answer in zip(prompts, alone, answers, strict=True):
        assert answer.token_ids == greedy(oracle, prompt, 120)
        assert answer.logprobs == before.logprobs


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context lets one answer outlast many others by far."""
    return make_llama_folder(
        tmp_path_factory.mktemp("models") / "long", max_position_embeddings=8192
    )


async def queued(service: LocalService, number: int) -> None:
    """Waits until so many requests wait at the router."""
    async with asyncio.timeout(10):
        while service.router.admission.num_queued != number:  # noqa: ASYNC110  # it sets no event
            await asyncio.sleep(0.005)


async def test_a_big_request_does_not_hold_up_small_ones(long_folder: Path) -> None:
    options = RouterOptions(port=0, max_passed_over_s=60)
    async with LocalService(long_folder, decode_args=reserving(4352), options=options) as service:

        async def ask(prompt: list[int], max_tokens: int) -> Answer:
            message = request(prompt, max_tokens=max_tokens, ignore_eos=True)
            return await collect(service.generation.Generate(message, timeout=60))

        blocker = service.generation.Generate(
            request([1] * 20, max_tokens=4077, ignore_eos=True), timeout=60
        )
        await blocker.read()  # from now on 16 of 272 blocks are free
        big = asyncio.create_task(ask([2] * 300, 400))
        await queued(service, 1)
        small = await asyncio.gather(*(ask([3 + i] * 8, 8) for i in range(20)))
        assert [len(answer.token_ids) for answer in small] == [8] * 20
        assert service.router.admission.num_queued == 1, "the small ones had to wait for the big"
        assert not big.done()
        blocker.cancel()
        assert len((await big).token_ids) == 400
        await service.wait_idle()


async def test_small_requests_that_keep_coming_do_not_starve_a_big_one(folder: Path) -> None:
    """One small one always runs, so that the big one can start only where they are held back."""
    options = RouterOptions(port=0, max_passed_over_s=0.05)
    async with LocalService(folder, decode_args=reserving(512), options=options) as service:
        smalls: list[asyncio.Task[None]] = []
        big_is_over, limit = asyncio.Event(), 100

        async def small(number: int) -> None:
            # 10, 13 or 17 of 32 blocks; of two that run, one ends before the other.
            num_tokens = 150 + 50 * (number % 3)
            message = request([number] * 8, max_tokens=num_tokens, ignore_eos=True)
            answer = Answer()
            async for response in service.generation.Generate(message, timeout=60):
                answer.take(response)
                early = len(smalls) < limit and sum(not task.done() for task in smalls) < 4
                if early and not big_is_over.is_set():
                    smalls.append(asyncio.create_task(small(len(smalls))))
            assert len(answer.token_ids) == num_tokens

        smalls.append(asyncio.create_task(small(0)))
        async with asyncio.timeout(10):
            while len(smalls) < 2:  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.001)
        answer = await collect(
            service.generation.Generate(
                request([251] * 190, max_tokens=290, ignore_eos=True),
                timeout=60,  # 30 blocks
            )
        )
        num_smalls = len(smalls)
        big_is_over.set()
        waited_s = answer.done.timings.queue_s + answer.done.timings.ticket_s
        assert waited_s >= 0.05, "a gap let it in: this run proves nothing"
        assert num_smalls < limit, "it had to wait until no more small ones came"
        await asyncio.gather(*smalls)
        await service.wait_idle()


async def test_a_slow_queue_honours_deadlines_without_prefill(folder: Path) -> None:
    options = RouterOptions(port=0, worker_silence_s=60)
    async with LocalService(
        folder, prefill_args=pool(512), decode_args=pool(480), options=options
    ) as service:
        blocker = service.generation.Generate(
            request([1] * 430, max_tokens=50, ignore_eos=True), timeout=60
        )
        await blocker.read()  # from now on 3 of 30 blocks are free
        decode = next(worker for worker in service.workers if worker.role == "decode")
        decode.process.signal(signal.SIGSTOP)  # the queue stands still, however fast the engine
        asked = asyncio.create_task(
            collect(
                service.generation.Generate(
                    request([2] * 60, max_tokens=60, ignore_eos=True), timeout=0.3
                )
            )
        )
        await queued(service, 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asked
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await queued(service, 0)
        assert service.router.num_in_flight == 1, "the blocker was over: nobody had to wait"
        blocker.cancel()
        decode.process.signal(signal.SIGCONT)
        await service.wait_idle()
        prefill_tokens = sum(load.prefill_tokens for _, load in await service.loads())
        assert prefill_tokens == 430, "what never ran was prefilled"
