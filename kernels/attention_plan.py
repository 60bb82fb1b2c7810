"""AttentionPlan: where each sequence's queries and KV rows lie, the same for all layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_TILE = 64  # queries a tile of the portable CPU path; 64 beat 128, 256 and one untiled call


@dataclass(frozen=True)
class CpuSequence:
    """One sequence of the plan as the portable CPU path reads it."""

    query_start: int
    query_end: int
    context_len: int
    blocks: Tensor  # [blocks of the context] int64
    block_size: int

    def rows(self, pages: Tensor) -> Tensor:
        """[context_len, ...] of one layer's pages [num_slots, ...]."""
        blocks = pages.view(-1, self.block_size, *pages.shape[1:]).index_select(0, self.blocks)
        return blocks.flatten(0, 1)[: self.context_len]


@dataclass(frozen=True)
class AttentionPlan:
    """Sequence s has queries `query_starts[s] : query_starts[s + 1]`, the last ones of a context
    of `context_lens[s]` rows, which lie in the blocks `block_table[s]`.

    The tensors are on the device of the pages. A recorded decode step reads them again at each
    run, so they may be overwritten between runs.
    """

    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32, its own queries included
    block_table: Tensor  # [S, W] int32; entries beyond a context are never read
    block_size: int
    max_queries: int  # of one sequence; 1: a decode step

    @classmethod
    def build(
        cls,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> AttentionPlan:
        """From lists; `block_tables[s]` has at least ceil(context_lens[s] / block_size) blocks."""
        width = max(len(blocks) for blocks in block_tables)
        table = torch.zeros((len(block_tables), width), dtype=torch.int32)
        for row, blocks in zip(table, block_tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts = [end - start for start, end in itertools.pairwise(query_starts)]
        return cls(
            torch.tensor(query_starts, dtype=torch.int32).to(device),
            torch.tensor(context_lens, dtype=torch.int32).to(device),
            table.to(device),
            block_size,
            max(counts),
        )

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.context_lens.shape[0]

    @property
    def one_query_each(self) -> bool:
        """True for a decode step."""
        return self.max_queries == 1

    @cached_property
    def cpu_sequences(self) -> list[CpuSequence]:
        """[S]; for the portable CPU path."""
        starts, lengths = self.query_starts.tolist(), self.context_lens.tolist()
        return [
            CpuSequence(
                starts[s],
                starts[s + 1],
                length,
                self.block_table[s, : -(-length // self.block_size)].long(),
                self.block_size,
            )
            for s, length in enumerate(lengths)
        ]
