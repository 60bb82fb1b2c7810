"""Comparing our models with transformers' logits, position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from memory_checkpoint import MemoryCheckpoint
from paged_runner import PagedRunner
from tiny_models import VOCAB_SIZE

from legato.worker.models.build import build_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from legato.worker.forward import Model

BLOCK_SIZE = 16


def build(reference: PreTrainedModel, device: str = "cpu") -> Model:
    checkpoint = MemoryCheckpoint(reference)
    model = build_model(checkpoint, torch.device(device), torch.float32)
    assert checkpoint.finished
    return model


def random_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[T, vocab_size]."""
    logits: Tensor = reference(torch.tensor([list(tokens)])).logits[0]
    return logits


def assert_same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def check_prefill_then_decode(
    reference: PreTrainedModel, model: Model, length: int, steps: int = 3
) -> None:
    tokens = random_tokens(length + steps)
    expected = reference_logits(reference, tokens)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    assert_same(runner.step({0: tokens[:length]}, all_logits=True), expected[:length])
    for position in range(length, length + steps):
        logits = runner.step({0: [tokens[position]]})
        assert logits.dtype == torch.float32
        assert_same(logits, expected[position : position + 1])


def greedy_together(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """`num_tokens` greedy tokens for each prompt, all in one batch."""
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    new: dict[int, Sequence[int]] = dict(enumerate(prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        best = runner.step(new).argmax(-1).tolist()
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
        new = {s: [token] for s, token in enumerate(best)}
    return answers
