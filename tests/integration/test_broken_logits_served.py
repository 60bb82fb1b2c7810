"""A real model that overflows on one token: what that request's client gets, and the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from local_service import Answer, LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama, write_byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from legato.protos import generation_pb2

pytestmark = pytest.mark.integration
BAD = 300  # overflows as soon as it is processed; no answer has it by itself


def make_overflowing_folder(folder: Path) -> Path:
    """Only BAD's embedding has a part in direction 0, whose V is beyond every dtype."""
    folder.mkdir(parents=True)
    model = make_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[BAD, 0] = 1.0
        model.model.layers[0].input_layernorm.weight[0] = 1.0
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = 3e38
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


async def broken(service: LocalService, message: generation_pb2.GenerateRequest) -> tuple[int, str]:
    """Tokens delivered before the error, and its sentence."""
    answer = Answer()

    async def read() -> None:
        async for response in service.generation.Generate(message, timeout=60):
            answer.take(response)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read()
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    return len(answer.token_ids), raised.value.details() or ""


async def test_neighbours_and_later_owners_of_the_blocks_get_their_own_answers(
    tmp_path: Path,
) -> None:
    folder = make_overflowing_folder(tmp_path / "model")
    oracle = load_oracle(folder)
    prompts = [list(f"neighbour {i} ".encode() * (i + 1)) for i in range(4)]
    answers = [greedy(oracle, prompt, 40) for prompt in prompts]
    in_prefill = request([*b"overflow", BAD], max_tokens=8)
    # The first token, which the bias chooses, is processed by the decode worker.
    in_decode = request(list(b"overflow".ljust(40)), max_tokens=8, logit_bias={BAD: 100.0})

    # A pool that four requests fill: whoever comes later has the blocks of the broken ones.
    kv_memory = str(30 * 16 * 3 * 2 * 2 * 16 * 4)
    async with LocalService(folder, decode=2, worker_args=["--kv-memory", kv_memory]) as service:

        async def ask(prompt: list[int]) -> Answer:
            message = request(prompt, max_tokens=40, ignore_eos=True)
            return await collect(service.generation.Generate(message, timeout=60))

        pids = [worker.pid for worker in service.workers]
        for _ in range(3):
            good = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            bad = [asyncio.create_task(broken(service, m)) for m in (in_prefill, in_decode)]
            for index, (num_tokens, sentence) in enumerate(await asyncio.gather(*bad)):
                assert num_tokens == index
                assert "no usable logits for this request" in sentence
                assert f"at output position {index} " in sentence
            for answer, reading in zip(answers, good, strict=True):
                found = await reading
                assert found.token_ids == answer
                assert found.done.timings.attempts == 1
            await service.wait_idle()
        assert service.control.lost == []
        assert [worker.pid for worker in service.workers] == pids
        assert service.router.counters.failed == 6
