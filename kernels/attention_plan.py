"""AttentionPlan: where each sequence's queries and KV rows lie, worked out once a forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CPU_TILE = 64  # queries a tile on the CPU; 64 beat 128, 256 and one untiled causal call
TRITON_TILE = 32  # queries a program of the Triton prefill kernel


@dataclass(frozen=True)
class CpuSequence:
    """One sequence of the plan as the CPU path reads it."""

    query_start: int
    query_end: int
    context_len: int
    # Rows of the pages where the blocks follow each other (read in place), else their block ids.
    kv: slice | Tensor

    def rows(self, pages: Tensor, block_size: int) -> Tensor:
        """[context_len, num_kv_heads, head_dim] of one layer's pages."""
        if isinstance(self.kv, slice):
            return pages[self.kv]
        blocks = pages.view(-1, block_size, *pages.shape[1:]).index_select(0, self.kv)
        return blocks.flatten(0, 1)[: self.context_len]


@dataclass(frozen=True)
class TritonTables:
    """The plan as tensors on the device, for the Triton kernels."""

    block_table: Tensor  # [S, most blocks] int64, rows padded with 0
    context_lens: Tensor  # [S] int64
    query_starts: Tensor  # [S + 1] int64
    tile_sequences: Tensor  # [tiles] int64, the sequence of each tile of TRITON_TILE queries
    tile_offsets: Tensor  # [tiles] int64, the tile's first query in its sequence


@dataclass(frozen=True)
class AttentionPlan:
    """Shared by all layers of a forward; each view is built when first asked for.

    Sequence s has queries `query_starts[s] : query_starts[s + 1]`, the last ones of a context of
    `context_lens[s]` rows which lie in `block_tables[s]`.
    """

    query_starts: list[int]  # [S + 1]
    context_lens: list[int]  # [S]
    block_tables: list[list[int]]  # [S][at least ceil(context_len / block_size)]
    block_size: int
    device: torch.device

    @cached_property
    def one_query_each(self) -> bool:
        """True for a decode step."""
        return self.query_starts[-1] == len(self.context_lens)

    @cached_property
    def cpu_sequences(self) -> list[CpuSequence]:
        """[S]."""
        sequences = []
        for s, context_len in enumerate(self.context_lens):
            blocks = self.block_tables[s][: -(-context_len // self.block_size)]
            first = blocks[0]
            kv: slice | Tensor
            if blocks == list(range(first, first + len(blocks))):
                kv = slice(first * self.block_size, first * self.block_size + context_len)
            else:
                kv = torch.tensor(blocks, dtype=torch.int64)
            start, end = self.query_starts[s], self.query_starts[s + 1]
            sequences.append(CpuSequence(start, end, context_len, kv))
        return sequences

    @cached_property
    def cpu_mask(self) -> Tensor:
        """[CPU_TILE, longest context + CPU_TILE] fp32: 0, then a causal triangle of -inf.

        The mask of every tile of every sequence is a window of it; see `cpu_tile_mask`.
        """
        width = max(self.context_lens)
        mask = torch.zeros(CPU_TILE, width + CPU_TILE)
        mask[:, width:] = torch.full((CPU_TILE, CPU_TILE), -torch.inf).triu_(1)
        return mask

    def cpu_tile_mask(self, num_queries: int, num_keys: int) -> Tensor:
        """[num_queries, num_keys]: the last query sees all keys, the one before one key less."""
        width = self.cpu_mask.shape[1] - CPU_TILE
        return self.cpu_mask[:num_queries, width + num_queries - num_keys : width + num_queries]

    @cached_property
    def triton_tables(self) -> TritonTables:
        """One copy to the device each."""
        most = max(len(table) for table in self.block_tables)
        table = [[*blocks, *([0] * (most - len(blocks)))] for blocks in self.block_tables]
        tiles = [
            (s, offset)
            for s, (start, end) in enumerate(
                zip(self.query_starts[:-1], self.query_starts[1:], strict=True)
            )
            for offset in range(0, end - start, TRITON_TILE)
        ]

        def to_device(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(self.device)

        return TritonTables(
            block_table=to_device(table),
            context_lens=to_device(self.context_lens),
            query_starts=to_device(self.query_starts),
            tile_sequences=to_device([s for s, _ in tiles]),
            tile_offsets=to_device([offset for _, offset in tiles]),
        )
