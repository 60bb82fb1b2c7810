"""Random pages of KV for attention tests: shuffled blocks, mixed lengths, chunks with a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.attention_plan import AttentionPlan


@dataclass(frozen=True)
class PagedCase:
    """One attention call's inputs."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: AttentionPlan
    scale: float


def make_case(
    *,
    context_lens: list[int],
    num_queries: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    shuffle: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PagedCase:
    """Sequence s has `num_queries[s]` new tokens at the end of `context_lens[s]`.

    Rows of no sequence hold huge values: reading one is seen.
    """
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator) if shuffle else torch.arange(num_blocks)
    tables, taken = [], 0
    for count in counts:
        tables.append(order[taken : taken + count].tolist())
        taken += count
    size = (num_blocks * block_size, num_kv_heads, head_dim)
    k_cache = torch.full(size, 1e4, dtype=dtype, device=device)
    v_cache = torch.full(size, 1e4, dtype=dtype, device=device)
    for table, length in zip(tables, context_lens, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
        k_cache[slots] = random(length, num_kv_heads, head_dim)
        v_cache[slots] = random(length, num_kv_heads, head_dim)
    query_starts = [0]
    for count in num_queries:
        query_starts.append(query_starts[-1] + count)
    # A slice of a wider tensor, as the model's fused projection gives it.
    q = random(query_starts[-1], num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    plan = AttentionPlan(query_starts, context_lens, tables, block_size, torch.device(device))
    return PagedCase(q, k_cache, v_cache, plan, head_dim**-0.5)
