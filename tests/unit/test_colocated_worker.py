"""A colocated worker computes prompts of any length and decodes, on one engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_engine import FakeModel, fake_config, fake_loaded
from worker_pair import Attempt, OpenPrefill, Pair, running_worker, sampling

from legato.protos import common_pb2, worker_pb2
from legato.worker.activation_peak import measure_activation_peak
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import KvShape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK = 48
LENGTHS = (1, 3, 4, 5, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1)


@asynccontextmanager
async def colocated(**settings: Any) -> AsyncIterator[Pair]:  # noqa: ANN401  # of `running_worker`
    settings = {"prefill_chunk_tokens": CHUNK, "num_blocks": 256, **settings}
    async with running_worker("colocated", **settings) as worker:
        yield Pair(worker, worker)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + salt + length) % 300 for i in range(length)]


async def test_it_says_what_it_is_and_serves_no_prefill_call() -> None:
    async with colocated() as pair:
        identity = await pair.d.control.GetIdentity(worker_pb2.GetIdentityRequest())
        assert identity.role == common_pb2.WORKER_ROLE_COLOCATED
        assert identity.worker_id.startswith("colocated-")
        request = Attempt(pair, [1, 2], sampling(3)).prefill_request()
        with pytest.raises(grpc.aio.AioRpcError, match="not served by a colocated worker"):
            await OpenPrefill(pair.p, request).read()


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_prompts_of_every_length_alone_are_computed_in_whole_chunks(max_tokens: int) -> None:
    async with colocated() as pair:
        for length in LENGTHS:
            attempt = Attempt(pair, prompt := prompt_of(length), sampling(max_tokens))
            assert await attempt.run_locally() == pair.d.model.expected(prompt, max_tokens)
            assert attempt.first is not None
            assert attempt.first.prefill_forwards == -(-length // CHUNK)
            await pair.until_idle()


async def test_a_replay_whose_last_token_is_left() -> None:
    async with colocated() as pair:
        prompt = prompt_of(13)
        plain = pair.d.model.expected(prompt, 6)
        again = Attempt(pair, prompt, sampling(6), attempt=1, emitted=plain[:5])
        assert await again.run_locally() == plain
        await pair.until_idle()


async def test_running_streams_go_on_beside_a_long_prompt_in_small_pieces() -> None:
    async with colocated() as pair:
        streams = [Attempt(pair, prompt_of(5, i), sampling(60), request_id=f"s{i}") for i in (1, 2)]
        for stream in streams:
            await stream.reserve()
            await stream.start_locally()
            await stream.local_first_token()
        long = Attempt(pair, prompt_of(200), sampling(4), request_id="long")
        answers = await asyncio.gather(
            long.run_locally(), *(stream._to_the_end(5) for stream in streams)
        )
        assert answers[0] == pair.d.model.expected(prompt_of(200), 4)
        for stream in streams:
            expected = pair.d.model.expected(stream.prompt, 60)
            assert stream.tokens[len(stream.prompt) :] == expected
        # While they run a step has 32 tokens of prompts at most, beside theirs.
        mixed = [step for step in pair.d.model.steps if len(step) == 3 and max(step) > 1]
        assert len(mixed) >= 3
        assert max(max(step) for step in mixed) <= 32
        await pair.until_idle()


async def test_more_than_there_is_room_for_and_all_end() -> None:
    async with colocated(num_blocks=24, max_batch_size=4) as pair:
        prompts = [prompt_of(5 + 7 * i, salt=i) for i in range(8)]

        async def ask(i: int) -> list[int]:
            while True:
                attempt = Attempt(pair, prompts[i], sampling(12), request_id=f"r{i}", arrival=i)
                try:
                    return await attempt.run_locally()
                except grpc.aio.AioRpcError as error:  # it had to leave before its first token
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise

        answers = await asyncio.gather(*map(ask, range(8)))
        assert answers == [pair.d.model.expected(prompt, 12) for prompt in prompts]
        await pair.until_idle()


async def test_cancelled_at_any_moment_it_holds_nothing() -> None:
    async with colocated() as pair:
        for num_reads in range(4):
            attempt = Attempt(pair, prompt_of(70), sampling(100))
            await attempt.reserve()
            if num_reads:
                await attempt.start_locally()
            for _ in range(num_reads - 1):
                await attempt.decode_call.read()
            attempt.close()
            await pair.until_idle()


def test_its_largest_steps_are_those_of_both_other_roles() -> None:
    def steps(role: str) -> list[list[int]]:
        loaded = fake_loaded(fake_config(context_length=100))
        config = WorkerConfig(
            model="fake",
            role=role,  # type: ignore[arg-type]  # literals
            kv_memory_fraction=0.5,
            max_batch_size=5,
            prefill_chunk_tokens=202,
        )
        shape = KvShape.of(loaded.model.config, config, loaded.dtype)
        measure_activation_peak(config, loaded, shape)
        assert isinstance(loaded.model, FakeModel)
        return loaded.model.steps

    assert steps("colocated") == [*steps("decode"), *steps("prefill")]
