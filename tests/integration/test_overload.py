"""A decode worker whose KV pool holds a third of what is asked of it: no answer may differ."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from local_service import Answer, LocalService, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 16
NUM_REQUESTS = 64
CONTEXT = 512
# Of the tiny model: K and V of 3 layers, 2 heads, 16 numbers of 4 bytes.
BLOCK_BYTES = BLOCK_SIZE * 2 * 3 * 2 * 16 * 4

SETTINGS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.1, "top_k": 40, "presence_penalty": 0.7, "logprobs": 0},
]


@dataclass(frozen=True)
class Offered:
    """One request, and the rows that its answers have at their end."""

    message: generation_pb2.GenerateRequest
    num_rows: int


def offer(dice: random.Random) -> list[Offered]:
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = [dice.randrange(256) for _ in range(dice.choice((1, 15, 16, 17, 40, 100, 160)))]
        max_tokens = dice.choice((2, 17, 40, 120, 200))
        message = request(
            prompt, max_tokens=max_tokens, ignore_eos=True, seed=number, **SETTINGS[number % 4]
        )
        message.n = 3 if number % 7 == 0 else 1
        message.priority = (
            common_pb2.PRIORITY_BATCH if number % 3 == 0 else common_pb2.PRIORITY_INTERACTIVE
        )
        requests.append(Offered(message, message.n * (len(prompt) + max_tokens - 1)))
    return requests


async def ask(service: LocalService, message: generation_pb2.GenerateRequest) -> list[Answer]:
    """All answers to it."""
    answers = [Answer() for _ in range(message.n)]
    async for response in service.generation.Generate(message, timeout=240):
        answers[response.index].take(response)
    return answers


def content(answer: Answer) -> tuple[list[int], str, list[bytes]]:
    """What the client sees of it, to the last bit of its logprobs."""
    logprobs = [one.SerializeToString(deterministic=True) for one in answer.logprobs]
    return answer.token_ids, answer.text, logprobs


async def decode_load(service: LocalService) -> common_pb2.WorkerLoad:
    return dict(await service.loads())[common_pb2.WORKER_ROLE_DECODE]


@pytest.mark.integration
@pytest.mark.parametrize("num_slots", [0, 40, 400])
async def test_answers_are_what_they_are_alone(tmp_path: Path, num_slots: int) -> None:
    folder = make_llama_folder(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    offered = offer(random.Random(7))
    num_blocks = sum(o.num_rows for o in offered) // BLOCK_SIZE // 3
    decode_args = ["--kv-memory", str(num_blocks * BLOCK_BYTES)]
    decode_args += ["--swap-memory", str(num_slots * BLOCK_BYTES)]
    async with LocalService(
        folder, worker_args=["--block-size", str(BLOCK_SIZE)], decode_args=decode_args
    ) as service:
        assert (await decode_load(service)).total_blocks == num_blocks
        alone = [await ask(service, o.message) for o in offered]
        await service.wait_idle()
        assert (await decode_load(service)).preemptions == 0

        short = request([5], max_tokens=3, ignore_eos=True)
        short.n = 128
        rounds: list[list[list[Answer]]] = []
        load = await decode_load(service)
        # On a busy machine the prompts come one by one, and most of them find room.
        while load.preemptions <= 10 and len(rounds) < 4:
            # Answers were short of late: too many of the long ones are let in.
            for _ in range(5):
                await ask(service, short)
            rounds.append(await asyncio.gather(*(ask(service, o.message) for o in offered)))
            await service.wait_idle()
            load = await decode_load(service)
        print(num_blocks, load)

    for together in rounds:
        for before, now in zip(alone, together, strict=True):
            assert [content(a) for a in now] == [content(a) for a in before]
    finishes = [answer.done for together in rounds for answers in together for answer in answers]
    assert load.preemptions > 10
    assert sum(f.timings.preemptions for f in finishes) == load.preemptions
    assert all(f.timings.attempts == 1 for f in finishes), "a preemption is no failure"
    assert load.swapped == load.swap_held_blocks == 0
    assert (load.preemptions > load.preemptions_returned) == (num_slots > 0)
    if num_slots == 0:
        assert load.preemptions_returned > 0
    oracle = load_oracle(folder)
    for one, answers in list(zip(offered, rounds[0], strict=True))[::4]:
        prompt, count = list(one.message.token_ids.ids), one.message.sampling.max_tokens
        assert answers[0].token_ids == greedy(oracle, prompt, count)
