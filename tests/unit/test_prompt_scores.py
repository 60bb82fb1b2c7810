"""Logprobs of prompts' tokens, as the engine takes them: against transformers, chunk by chunk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from model_checks import build, random_tokens, reference_logits
from tiny_models import FAMILIES, VOCAB_SIZE, make_model

from legato.worker import prompt_scores
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.model_runner import ModelRunner
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from legato.worker.forward import Model

BLOCK_SIZE, NUM_BLOCKS = 16, 32
CPU = torch.device("cpu")
GREEDY = SamplingParams.greedy_for(1)


def prompt(length: int, count: int | None, *, hashes: bool = False, seed: int = 0) -> Sequence:
    tokens = random_tokens(length, seed)
    return Sequence(
        token_ids=tokens,
        num_prompt_tokens=length,
        params=dataclasses.replace(GREEDY, prompt_logprobs=count),
        eos_token_ids=frozenset(),
        block_hashes=[bytes([place]) * 8 for place in range(length // BLOCK_SIZE)] * hashes,
    )


class Prefill:
    """A prefill engine without its thread."""

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        config = model.config
        shape = KvShape(
            config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32
        )
        self.scheduler = PrefillScheduler(BlockPool(NUM_BLOCKS), BLOCK_SIZE, chunk_tokens)
        self._runner = ModelRunner(model, KvCache(shape, NUM_BLOCKS, CPU), CPU, 8)

    @torch.inference_mode()
    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        while (step := self.scheduler.schedule(0.0)) is not None:
            logits = self._runner.forward(step)
            if logits.scores is not None:
                logits.scores.fetch()
                logits.scores.collect()
            self.scheduler.commit(step)
        for sequence in sequences:
            assert sequence.lease is not None
            sequence.lease.release()


def check(reference: PreTrainedModel, sequence: Sequence) -> None:
    scores = sequence.prompt_scores
    assert scores is not None
    length = len(sequence.token_ids)
    if length == 1:
        assert scores.own == []
        return
    expected = reference_logits(reference, sequence.token_ids)[:-1].log_softmax(-1)
    own, ids = torch.cat(scores.own), torch.cat(scores.top_ids)
    values = torch.cat(scores.top_values)
    following = torch.tensor(sequence.token_ids[1:])[:, None]
    assert own.shape == (length - 1,)
    assert ids.shape == values.shape == (length - 1, min(scores.count, VOCAB_SIZE))
    torch.testing.assert_close(own, expected.gather(1, following)[:, 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=0, atol=1e-4)
    best = expected.topk(ids.shape[1]).values
    torch.testing.assert_close(values, best, rtol=0, atol=1e-4)
    assert not scores.broken


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [13, 256])
def test_every_position_equals_transformers(family: str, chunk_tokens: int) -> None:
    reference = make_model(family)
    asked = [(40, 3), (1, 2), (7, None), (14, 0), (2, 20), (61, 20)]
    prompts = [prompt(length, count, seed=i) for i, (length, count) in enumerate(asked)]
    Prefill(build(reference), chunk_tokens).run(*prompts)
    for sequence in prompts:
        if sequence.params.prompt_logprobs is None:
            assert sequence.prompt_scores is None
        else:
            check(reference, sequence)


@pytest.mark.parametrize("rows", [1, 5, 38, 39, 40])
def test_logits_are_made_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    reference = make_model("llama")
    monkeypatch.setattr(prompt_scores, "MAX_PIECE_BYTES", rows * 4 * VOCAB_SIZE)
    assert prompt_scores.rows_a_piece(VOCAB_SIZE) == rows
    sequence = prompt(40, 5)
    Prefill(build(reference), 256).run(sequence)
    check(reference, sequence)


def test_a_piece_is_bounded_and_never_empty() -> None:
    assert prompt_scores.rows_a_piece(151_936) * 4 * 151_936 <= prompt_scores.MAX_PIECE_BYTES
    assert prompt_scores.rows_a_piece(1 << 30) == 1


def test_cached_blocks_are_not_used_and_stay_usable() -> None:
    reference = make_model("llama")
    engine = Prefill(build(reference), 256)
    plain, scored, again = (prompt(50, count, hashes=True) for count in (None, 2, None))
    engine.run(plain)
    engine.run(scored)
    engine.run(again)
    assert (plain.num_cached, scored.num_cached, again.num_cached) == (0, 0, 48)
    check(reference, scored)


def test_what_it_computed_is_found_by_others() -> None:
    engine = Prefill(build(make_model("llama")), 256)
    scored, plain = prompt(50, 2, hashes=True), prompt(50, None, hashes=True)
    engine.run(scored)
    engine.run(plain)
    assert plain.num_cached == 48


def test_a_token_that_cannot_be_keeps_its_minus_infinity() -> None:
    scores = prompt_scores.PromptScores(2)
    rows = prompt_scores.ScoredRows(torch.tensor([0]), torch.tensor([2]), 2, [(scores, 1)])
    [(_, take)] = rows.pieces(8)
    take(torch.tensor([[0.0, -torch.inf, -torch.inf]]))
    rows.collect()
    assert scores.own[0].tolist() == [-torch.inf]
    assert scores.top_values[0].tolist() == [[0.0, -torch.inf]]
    assert not scores.broken


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_position_is_noticed(bad: float) -> None:
    scores = prompt_scores.PromptScores(0)
    rows = prompt_scores.ScoredRows(torch.tensor([0]), torch.tensor([0]), 0, [(scores, 1)])
    [(_, take)] = rows.pieces(8)
    take(torch.tensor([[0.0, bad, 1.0]]))
    rows.collect()
    assert scores.broken
