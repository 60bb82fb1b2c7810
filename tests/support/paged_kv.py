"""Random pages of KV for attention tests: shuffled blocks, mixed lengths, chunks with a prefix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from legato.kernels.attention_plan import AttentionPlan
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages
from legato.kernels.kv_quantize import quantize_rows

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PagedCase:
    """One attention call's inputs."""

    q: Tensor
    pages: KvPages
    plan: AttentionPlan
    scale: float
    window: int | None = None

    def slot(self, sequence: int, position: int) -> int:
        """Where a sequence's row lies in the pages."""
        size = self.plan.block_size
        return int(self.plan.block_table[sequence, position // size]) * size + position % size

    def only(self, sequences: Sequence[int], width: int | None = None) -> PagedCase:
        """The same pages, fewer sequences, in another order or at another table width."""
        plan, device = self.plan, self.q.device
        starts, tables = plan.query_starts.tolist(), plan.block_table.tolist()
        rows = [self.q[starts[s] : starts[s + 1]] for s in sequences]
        query_starts = [0]
        for row in rows:
            query_starts.append(query_starts[-1] + row.shape[0])
        lengths = [int(plan.context_lens[s]) for s in sequences]
        needed = [
            tables[s][: -(-length // plan.block_size)]
            for s, length in zip(sequences, lengths, strict=True)
        ]
        if width is not None:
            needed = [blocks + [0] * (width - len(blocks)) for blocks in needed]
        chosen = AttentionPlan.build(query_starts, lengths, needed, plan.block_size, device)
        return dataclasses.replace(self, q=torch.cat(rows), plan=chosen)


def make_case(
    *,
    context_lens: Sequence[int],
    num_queries: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    device: str = "cpu",
) -> PagedCase:
    """Sequence s has `num_queries[s]` new tokens at the end of `context_lens[s]`.

    Rows of no sequence hold values that are seen where one is read: huge ones, or 8-bit rows whose
    scales are huge. `kv_dtype` None: as `dtype`.
    """
    generator = torch.Generator().manual_seed(1)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    quantized = kv_dtype in QUANTIZED_DTYPES

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator)
    tables, taken = [], 0
    for count in counts:
        tables.append(order[taken : taken + count].tolist())
        taken += count
    size = (num_blocks * block_size, num_kv_heads, head_dim)
    k, v = (torch.full(size, 64.0 if quantized else 1e4).to(kv_dtype) for _ in range(2))
    k_scale, v_scale = (torch.full(size[:2], 1e4) if quantized else None for _ in range(2))
    for table, length in zip(tables, context_lens, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
        for rows, scales in ((k, k_scale), (v, v_scale)):
            new = random(length, num_kv_heads, head_dim)
            if scales is None:
                rows[slots] = new.to(kv_dtype)
            else:
                rows.view(torch.uint8)[slots], scales[slots] = _quantize(new, kv_dtype)
    query_starts = [0]
    for count in num_queries:
        query_starts.append(query_starts[-1] + count)
    # A slice of a wider tensor, as the model's fused projection gives it.
    q = random(query_starts[-1], num_heads + 2 * num_kv_heads, head_dim).to(dtype).to(device)
    k, v, k_scale, v_scale = (
        None if tensor is None else tensor.to(device) for tensor in (k, v, k_scale, v_scale)
    )
    assert k is not None
    assert v is not None
    plan = AttentionPlan.build(
        query_starts, list(context_lens), tables, block_size, torch.device(device)
    )
    pages = KvPages(k, v, k_scale, v_scale)
    return PagedCase(q[:, :num_heads], pages, plan, head_dim**-0.5, window)


def _quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As bytes, for torch cannot assign to float8 by index everywhere."""
    quantized, scales = quantize_rows(rows, dtype)
    return quantized.view(torch.uint8), scales
