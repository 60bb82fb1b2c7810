"""DecodeInputs: the memory that a recorded decode step reads, written anew before each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.kernels.attention_plan import AttentionPlan
from legato.worker.forward import ForwardBatch
from legato.worker.kv.block_pool import blocks_for

if TYPE_CHECKING:
    from legato.worker.forward import Empty
    from legato.worker.scheduling.step import StepPart


class DecodeInputs:
    """For steps of one new token a sequence, up to `capacity` sequences, on the CPU."""

    def __init__(self, capacity: int, context_length: int, block_size: int) -> None:
        self.capacity = capacity
        self._block_size = block_size
        width = blocks_for(context_length, block_size)
        # numpy and torch names of the same memory: numpy writes small things quicker.
        self._token_ids = np.zeros(capacity, np.int64)
        self._positions = np.zeros(capacity, np.int64)
        self._slots = np.zeros(capacity, np.int64)
        self._context_lens = np.zeros(capacity, np.int32)
        self._block_table = np.zeros((capacity, width), np.int32)

    def fill(self, parts: list[StepPart]) -> None:
        """Writes one row a part, in order."""
        size = self._block_size
        for row, part in enumerate(parts):
            sequence = part.sequence
            assert sequence.lease is not None, "scheduled without blocks"
            blocks, position = sequence.lease.blocks, sequence.num_computed
            used = position // size + 1
            self._token_ids[row] = sequence.token_ids[position]
            self._positions[row] = position
            self._slots[row] = blocks[used - 1] * size + position % size
            self._context_lens[row] = position + 1
            self._block_table[row, :used] = blocks[:used]

    def batch(self, num_sequences: int, empty: Empty) -> ForwardBatch:
        """The first rows as a batch that asks for all logits; shares this memory."""
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:num_sequences]),
            positions=torch.from_numpy(self._positions[:num_sequences]),
            slots=torch.from_numpy(self._slots[:num_sequences]),
            plan=AttentionPlan(
                query_starts=torch.arange(num_sequences + 1, dtype=torch.int32),
                context_lens=torch.from_numpy(self._context_lens[:num_sequences]),
                block_table=torch.from_numpy(self._block_table[:num_sequences]),
                block_size=self._block_size,
                max_queries=1,
            ),
            logit_rows=torch.arange(num_sequences),
            empty=empty,
        )
