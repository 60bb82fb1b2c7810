"""Prefill → hand-off → decode gives transformers' tokens, one for one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from demo_model import demo_model_path
from local_service import LocalService, collect, request
from oracle import greedy, greedy_after_each, load_oracle
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 16
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "Water boils at 100 degrees Celsius because",
    "List three colours:\n1.",
    "Q: What is 17 + 25?\nA:",
    "¿Dónde está la biblioteca?",
    "import torch\nimport torch.nn as nn\n\nclass Model(nn.Module):",
    "😀 emoji are fun, and",
    "In 1969, the first humans walked on",
    "To be, or not to be, that is the question:",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "SELECT name, age FROM users WHERE",
    "<html>\n<body>\n<h1>",
    "The recipe needs 2 cups of flour, 1 cup of sugar and",
    "x",
    " leading space and   several   spaces",
    "Photosynthesis is the process by which plants",
    "Dear Sir or Madam,\n\nI am writing to",
    "Numbers: 1234567890 and 3.14159; then",
    "A" * 200,
]


@pytest.mark.integration
async def test_demo_model_equals_transformers_for_64_tokens() -> None:
    path = demo_model_path()
    async with LocalService(path) as service:
        answers = await asyncio.gather(
            *(
                collect(
                    service.generation.Generate(
                        request(prompt, max_tokens=64, ignore_eos=True), timeout=240
                    )
                )
                for prompt in PROMPTS
            )
        )
        await service.wait_idle()
        prompts = [service.router.text.encode_text(prompt) for prompt in PROMPTS]
    oracle = await asyncio.to_thread(load_oracle, path)
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        # Token by token the oracle would take minutes.
        expected = await asyncio.to_thread(greedy_after_each, oracle, prompt, answer.token_ids)
        assert len(answer.token_ids) == 64
        assert answer.token_ids == expected, text
        assert answer.done.timings.prefill_forwards == 1
        assert answer.done.timings.decode_forwards == 63
        assert answer.done.timings.kv_tokens_written == len(prompt) + 63


@pytest.mark.integration
async def test_every_prompt_length_over_three_blocks(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    oracle = load_oracle(folder)
    lengths = range(1, 3 * BLOCK_SIZE + 2)
    prompts = [[(7 * n + 13 * i * i + i) % 256 for i in range(n)] for n in lengths]
    async with LocalService(folder, worker_args=["--block-size", str(BLOCK_SIZE)]) as service:
        for prompt in prompts:
            answer = await collect(
                service.generation.Generate(
                    request(prompt, max_tokens=20, ignore_eos=True), timeout=60
                )
            )
            assert answer.token_ids == greedy(oracle, prompt, 20), len(prompt)
        await service.wait_idle()


@pytest.mark.integration
async def test_cached_prompts_and_second_turns_give_the_same_tokens(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    oracle = load_oracle(folder)
    args = ["--block-size", str(BLOCK_SIZE)]
    async with LocalService(folder, worker_args=args) as service:

        async def ask(prompt: list[int]) -> tuple[list[int], int]:
            answer = await collect(
                service.generation.Generate(
                    request(prompt, max_tokens=20, ignore_eos=True), timeout=60
                )
            )
            cached = answer.done.usage.cached_prompt_tokens
            assert answer.done.timings.kv_tokens_written == len(prompt) + 19 - cached
            return answer.token_ids, cached

        for n in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49):
            prompt = [(11 * n + 17 * i * i + i) % 256 for i in range(n)]
            answer, cached = await ask(prompt)
            assert (answer, cached) == (greedy(oracle, prompt, 20), 0), n
            assert await ask(prompt) == (answer, (n - 1) // BLOCK_SIZE * BLOCK_SIZE), n
            turn = [*prompt, *answer, 3, 1, 4]
            expected = greedy(oracle, turn, 20)
            assert await ask(turn) == (expected, n // BLOCK_SIZE * BLOCK_SIZE), n
        await service.wait_idle()


@pytest.mark.integration
async def test_a_lost_row_would_be_seen(tmp_path: Path) -> None:
    """The comparison above is not blind: without one token of the prompt the answer differs."""
    oracle = load_oracle(make_llama_folder(tmp_path / "tiny"))
    differing = 0
    for n in range(8, 28):
        prompt = [(7 * n + 13 * i * i + i) % 256 for i in range(n)]
        differing += greedy(oracle, prompt, 20) != greedy(oracle, prompt[:3] + prompt[4:], 20)
    assert differing >= 18, differing
