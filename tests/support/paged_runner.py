"""PagedRunner: drives a Model through ForwardBatches over shuffled blocks, as a scheduler would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.attention_plan import AttentionPlan
from legato.worker.forward import ForwardBatch
from legato.worker.kv.cache import KvCache, KvShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

from legato.worker.forward import Model


class PagedRunner:
    """Sequences are numbered from 0 and never freed; blocks are dealt in shuffled order."""

    def __init__(
        self,
        model: Model,
        *,
        block_size: int = 16,
        num_blocks: int = 128,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        shape = KvShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
        self.model = model
        self.device = torch.device(device)
        self.cache = KvCache(shape, num_blocks, self.device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self._free: list[int] = order.tolist()
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def blocks(self, sequence: int) -> list[int]:
        """A sequence's, in order."""
        return self._blocks[sequence]

    def slot(self, sequence: int, position: int) -> int:
        """Where a sequence's row of KV lies."""
        size = self.cache.shape.block_size
        return self._blocks[sequence][position // size] * size + position % size

    def step(
        self,
        new_tokens: dict[int, Sequence[int]],
        *,
        all_logits: bool = False,
        logits: bool = True,
        position_offset: int = 0,
    ) -> Tensor:
        """One forward of these sequences' new tokens.

        Returns logits [S, vocab_size] of each one's last token, or [T, vocab_size] of all, or none.
        `position_offset` plants a bug.
        """
        size = self.cache.shape.block_size
        token_ids, positions, slots, starts, lengths, last = [], [], [], [0], [], []
        for sequence, tokens in new_tokens.items():
            done = self._lengths.get(sequence, 0)
            length = done + len(tokens)
            blocks = self._blocks.setdefault(sequence, [])
            while len(blocks) * size < length:
                blocks.append(self._free.pop())
            token_ids.extend(tokens)
            positions.extend(range(done + position_offset, length + position_offset))
            slots.extend(self.slot(sequence, position) for position in range(done, length))
            starts.append(len(token_ids))
            lengths.append(length)
            last.append(len(token_ids) - 1)
            self._lengths[sequence] = length
        rows = list(range(len(token_ids))) if all_logits else last if logits else []

        def ids(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        batch = ForwardBatch(
            token_ids=ids(token_ids),
            positions=ids(positions),
            slots=ids(slots),
            plan=AttentionPlan.build(
                starts,
                lengths,
                [self._blocks[sequence] for sequence in new_tokens],
                size,
                self.device,
            ),
            logit_rows=ids(rows),
        )
        return self.model.forward(batch, self.cache)
