"""Passes: single forward passes of a model with their sampling, timed; no scheduler, no queue."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool, blocks_for
from legato.worker.sampler import SamplingRow, sample
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.bench.decode_curve.capacity_engine import CapacityEngine


class Passes:
    """Of an engine whose pool nobody else uses.

    The speed of a pass does not depend on what stands in the KV, so a long context is had for
    nothing: its rows are whatever the pool holds.
    """

    def __init__(self, engine: CapacityEngine) -> None:
        self.engine = engine
        self._pool = BlockPool(engine.cache.num_blocks)
        self._block_size = engine.cache.shape.block_size
        self._draw = random.Random(1)

    @property
    def max_rows(self) -> int:
        """Of KV that one sequence may have."""
        return min(
            self.engine.model.config.context_length,
            self.engine.cache.num_blocks * self._block_size,
        )

    def has_room(self, num_sequences: int, rows: int) -> bool:
        """Whether so many sequences with so many rows each fit in."""
        blocks = num_sequences * blocks_for(rows, self._block_size)
        fits_batch = num_sequences <= self.engine.max_batch_size
        return fits_batch and rows <= self.max_rows and blocks <= self._pool.total

    def prefill_s(self, num_tokens: int) -> float:
        """A whole prompt in one pass, with its first token."""
        with self._sequences(1, num_tokens, num_tokens) as [sequence]:
            return self._timed([sequence], num_tokens)

    def decode_s(self, num_sequences: int, context_tokens: int, num_steps: int) -> list[float]:
        """Steps that give each sequence a token, the first behind so many rows of KV."""
        rows = context_tokens + num_steps
        with self._sequences(num_sequences, context_tokens + 1, rows) as sequences:
            for sequence in sequences:
                sequence.num_computed = context_tokens
            return [self._timed(sequences, 1) for _ in range(num_steps)]

    def answer_s(self, num_tokens: int, num_steps: int) -> tuple[float, list[float]]:
        """A prompt and the steps behind it: (until the first token, each further token)."""
        with self._sequences(1, num_tokens, num_tokens + num_steps) as [sequence]:
            first_s = self._timed([sequence], num_tokens)
            return first_s, [self._timed([sequence], 1) for _ in range(num_steps)]

    @contextmanager
    def _sequences(self, count: int, num_tokens: int, rows: int) -> Iterator[list[Sequence]]:
        """`rows`: of KV, that each has blocks for."""
        assert self.has_room(count, rows), f"{count} sequences of {rows} rows do not fit"
        params = SamplingParams.greedy_for(rows + 1, ignore_eos=True)
        vocab_size = self.engine.model.config.vocab_size
        sequences = []
        for _ in range(count):
            blocks = self._pool.allocate(blocks_for(rows, self._block_size))
            assert blocks is not None, "has_room has counted"
            ids = [self._draw.randrange(vocab_size) for _ in range(num_tokens)]
            lease = BlockLease(self._pool, blocks)
            sequences.append(Sequence(ids, num_tokens, params, frozenset(), lease=lease))
        try:
            yield sequences
        finally:
            for sequence in sequences:
                assert sequence.lease is not None, "made with one"
                sequence.lease.release()

    @torch.inference_mode()
    def _timed(self, sequences: list[Sequence], num_tokens: int) -> float:
        """`num_tokens` new ones of each, to the last of which a next one is sampled."""
        step = Step([StepPart(sequence, num_tokens) for sequence in sequences])
        began_s = time.perf_counter()
        logits = self.engine.runner.forward(step)
        sampled = sample(logits, [SamplingRow.of(sequence) for sequence in sequences])
        seconds = time.perf_counter() - began_s
        for sequence, token in zip(sequences, sampled, strict=True):
            if token is None:
                raise ValueError("the model gave no usable logits: NaN or infinite values")
            sequence.num_computed += num_tokens
            sequence.append(token.token_id)
        return seconds
