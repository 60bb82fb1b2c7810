"""Colocated workers alone give what a pair gives, and transformers' tokens; also where one dies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from local_service import Answer, LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from legato.protos import generation_pb2

pytestmark = pytest.mark.integration

BLOCK_SIZE, CHUNK = 16, 64
ARGS = ["--block-size", str(BLOCK_SIZE), "--prefill-chunk-tokens", str(CHUNK)]
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
ALONE = {"prefill": 0, "decode": 0, "colocated": 1}
CASES: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0, "seed": 1, "logprobs": 3},
    {"temperature": 0.9, "seed": 11, "logprobs": 2},
    {"temperature": 1.1, "seed": 5, "top_k": 40, "presence_penalty": 0.7},
    {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.3, "min_p": 0.01},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * length + 13 * i * i + i + salt) % 256 for i in range(length)]


async def ask(service: LocalService, message: generation_pb2.GenerateRequest) -> list[Answer]:
    """All answers; each is checked while it comes."""
    answers = [Answer() for _ in range(message.n or 1)]
    async for response in service.generation.Generate(message, timeout=120):
        answers[response.index].take(response)
    assert all(answer.finish is not None for answer in answers)
    return answers


async def test_prompts_of_every_length_equal_the_oracle_alone_and_together(folder: Path) -> None:
    oracle = load_oracle(folder)
    async with LocalService(folder, **ALONE, worker_args=ARGS) as service:  # type: ignore[arg-type]  # sizes
        for max_tokens in (20, 1):
            for length in LENGTHS:
                prompt = prompt_of(length, max_tokens)
                message = request(prompt, max_tokens=max_tokens, ignore_eos=True)
                [answer] = await ask(service, message)
                assert answer.token_ids == greedy(oracle, prompt, max_tokens), length
                assert answer.done.timings.prefill_forwards == -(-length // CHUNK)
        prompts = [prompt_of(length, 99) for length in LENGTHS]
        found = await asyncio.gather(
            *(ask(service, request(p, max_tokens=20, ignore_eos=True)) for p in prompts)
        )
        for prompt, [answer] in zip(prompts, found, strict=True):
            assert answer.token_ids == greedy(oracle, prompt, 20)
        await service.wait_idle()
        assert {role for role, load in await service.loads() if load.kv_bytes_received} == set()


async def test_sampling_logprobs_and_several_answers_equal_those_of_a_pair(folder: Path) -> None:
    def messages() -> list[generation_pb2.GenerateRequest]:
        made = []
        for length in (16, 129):
            for case in CASES:
                for max_tokens, n in ((24, 1), (24, 3), (1, 1), (1, 3)):
                    made.append(
                        request(prompt_of(length), max_tokens=max_tokens, ignore_eos=True, **case)
                    )
                    made[-1].n = n
        return made

    found = []
    for counts in ({"prefill": 1, "decode": 1}, ALONE):
        async with LocalService(folder, **counts, worker_args=ARGS) as service:  # type: ignore[arg-type]  # sizes
            answers = [await ask(service, message) for message in messages()]
            found.append(
                [
                    (
                        answer.token_ids,
                        [one.SerializeToString(deterministic=True) for one in answer.logprobs],
                        answer.done.usage.seed,
                        answer.done.finish_reason,
                    )
                    for several in answers
                    for answer in several
                ]
            )
            await service.wait_idle()
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(CASES) * 8


async def test_of_several_answers_the_prompt_is_computed_once(folder: Path) -> None:
    async with LocalService(folder, **ALONE, worker_args=ARGS) as service:  # type: ignore[arg-type]  # sizes
        message = request(prompt_of(130), max_tokens=10, temperature=1.0, seed=1, ignore_eos=True)
        message.n = 4
        answers = await ask(service, message)
        await service.wait_idle()
        [(_, load)] = await service.loads()
        # The others compute what is behind the last full block.
        assert load.prefill_tokens == 130 + 3 * (130 - 128)
        assert len({tuple(answer.token_ids) for answer in answers}) > 1


async def test_cancelled_at_random_it_holds_nothing(folder: Path) -> None:
    async with LocalService(folder, **ALONE, worker_args=ARGS) as service:  # type: ignore[arg-type]  # sizes
        for number in range(24):
            message = request(prompt_of(150, number), max_tokens=200, ignore_eos=True)
            message.n = 1 + number % 3
            call = service.generation.Generate(message, timeout=60)
            reads = number % 4
            for _ in range(reads):
                await call.read()
            if not reads:
                await asyncio.sleep(0.002 * number)
            call.cancel()
        await service.wait_idle()
        status = await service.status()
        assert status.router.in_flight == 0


async def test_a_worker_that_is_killed_loses_no_stream(folder: Path) -> None:
    """Two colocated workers; one dies under all its streams."""
    prompts = [prompt_of(20 + 9 * i, i) for i in range(12)]
    options = RouterOptions(port=0)
    counts = {"prefill": 0, "decode": 0, "colocated": 2}
    async with LocalService(folder, **counts, worker_args=ARGS, options=options) as service:  # type: ignore[arg-type]  # sizes

        async def answer_to(prompt: list[int]) -> Answer:
            message = request(prompt, max_tokens=300, ignore_eos=True)
            return await collect(service.generation.Generate(message, timeout=120))

        alone = [(await answer_to(prompt)).token_ids for prompt in prompts]
        running = [asyncio.create_task(answer_to(prompt)) for prompt in prompts]
        victim = service.workers[0]
        async with asyncio.timeout(30):
            while not any(  # noqa: ASYNC110  # the state is the router's
                v.worker_id == victim.worker_id and v.load is not None and v.load.running >= 3
                for v in service.router.pool.views()
            ):
                await asyncio.sleep(0.005)
        await asyncio.to_thread(victim.kill)
        answers = await asyncio.gather(*running)
        moved = sum(answer.done.timings.attempts > 1 for answer in answers)
        assert moved >= 3, "no stream ran on the worker that was killed"
        assert [answer.token_ids for answer in answers] == alone
        assert (await service.status()).router.failed == 0
        service.workers.remove(victim)
        await service.wait_idle()
