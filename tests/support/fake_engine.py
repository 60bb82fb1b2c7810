"""A fake model whose next token depends on every KV row it reads, and a fake greedy sampler."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from legato.worker.loading import LoadedModel
from legato.worker.models.config import ModelConfig
from legato.worker.sampler import Sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache
    from legato.worker.logits import Logits
    from legato.worker.sampler import SamplingRow

VOCAB_SIZE = 320


def fake_config(
    *, num_layers: int = 3, num_kv_heads: int = 2, head_dim: int = 4, context_length: int = 512
) -> ModelConfig:
    return ModelConfig(
        architecture="Fake",
        num_layers=num_layers,
        hidden_size=num_kv_heads * head_dim,
        intermediate_size=8,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=VOCAB_SIZE,
        context_length=context_length,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    )


class FakeModel:
    """Writes rows made of (token, position, layer), and hashes all rows of the context."""

    recordable = False

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.steps: list[list[int]] = []  # new tokens of each sequence, a list a step
        self.failure: BaseException | None = None
        self.breaks_after: set[int] = set()  # tokens after which all logits are NaN
        # A test that clears `go` finds the engine inside its next step once `inside` is set.
        self.go = threading.Event()
        self.go.set()
        self.inside = threading.Event()

    def rows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[T, num_layers, 2, num_kv_heads, head_dim], whole numbers below 251."""
        c = self.config
        shape = (c.num_layers, 2, c.num_kv_heads, c.head_dim)
        feature = torch.arange(c.num_layers * 2 * c.num_kv_heads * c.head_dim).view(shape)
        mixed = (tokens * 31 + positions * 17).view(-1, 1, 1, 1, 1)
        return (mixed + feature * 7) % 251

    def next_token(self, rows: Tensor) -> int:
        """Of a context's rows: each row and each feature has its own weight, and every bit counts:
        what is no whole number is not taken for one.
        """
        flat = rows.reshape(len(rows), -1)
        whole = flat.to(torch.int64)
        whole = whole + (flat != whole) * 1009
        features = torch.arange(flat.shape[1]) * 5 + 3
        weights = torch.arange(len(rows)) * 11 + 1
        return int((whole @ features * weights).sum() * 48271 % 2147483647 % VOCAB_SIZE)

    def expected(self, prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
        """The answer, computed without cache, blocks or workers."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            ids = torch.tensor(tokens)
            rows = self.rows(ids, torch.arange(len(tokens)))
            tokens.append((self.next_token(rows) + seed) % VOCAB_SIZE)
        return tokens[len(prompt) :]

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        self.inside.set()
        assert self.go.wait(60), "the test forgot to let the engine go"
        if self.failure is not None:
            raise self.failure
        starts = batch.plan.query_starts.tolist()
        self.steps.append([b - a for a, b in pairwise(starts)])
        rows = self.rows(batch.token_ids, batch.positions)
        for layer in range(self.config.num_layers):
            cache.layers[layer].k[batch.slots] = rows[:, layer, 0].to(cache.shape.dtype)
            cache.layers[layer].v[batch.slots] = rows[:, layer, 1].to(cache.shape.dtype)
            if batch.reports is not None:
                batch.reports.note(layer)
        logits = torch.zeros(len(batch.logit_rows), VOCAB_SIZE)
        wanted = batch.logit_rows.tolist()
        size = cache.shape.block_size
        for index, context_len in enumerate(batch.plan.context_lens.tolist()):
            last = starts[index + 1] - 1
            if last not in wanted:
                continue
            blocks = batch.plan.block_table[index].tolist()
            slots = torch.tensor([blocks[p // size] * size + p % size for p in range(context_len)])
            context = torch.stack(
                [
                    torch.stack((k[slots], v[slots]), 1)
                    for k, v in ((layer.k, layer.v) for layer in cache.layers)
                ],
                1,
            )
            logits[wanted.index(last), self.next_token(context)] = 1.0
            if int(batch.token_ids[last]) in self.breaks_after:
                logits[wanted.index(last)] = torch.nan
        return logits


@dataclass(frozen=True)
class ReadTokens:
    """Tokens that are on the CPU already."""

    sampled: list[Sampled | None]

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([-1 if s is None else s.token_id for s in self.sampled])

    def collect(self) -> list[Sampled | None]:
        return self.sampled


def fake_sample(logits: Logits, rows: Sequence[SamplingRow]) -> ReadTokens:
    """The best token's id plus the seed; a banned token gives way to the next id that is not."""
    sampled: list[Sampled | None] = []
    for row_logits, row in zip(logits.values, rows, strict=True):
        if row_logits.isnan().any():
            sampled.append(None)
            continue
        token_id = (int(row_logits.argmax()) + row.params.seed) % VOCAB_SIZE
        while token_id in row.banned_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
        top = ((token_id, -0.5),) if row.params.logprobs else ()
        sampled.append(Sampled(token_id, None if row.params.logprobs is None else -0.5, top))
    return ReadTokens(sampled)


def fake_loaded(
    config: ModelConfig | None = None, fingerprint: str = "fake", weights: str = "float32"
) -> LoadedModel:
    return LoadedModel(
        FakeModel(config or fake_config()),
        fingerprint,
        weights,
        torch.float32,
        torch.device("cpu"),
        Path("fake"),
    )
