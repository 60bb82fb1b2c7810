"""paged_decode_attention: one query a sequence over its pages of KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from legato.kernels.attention_plan import AttentionPlan


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """softmax(q Kᵀ scale) V for the newest token of every sequence.

    Args:
        q: [S, num_heads, head_dim]; head h reads KV head h // (num_heads / num_kv_heads).
        k_cache, v_cache: one layer's pages, [num_slots, num_kv_heads, head_dim].
        plan: with one query a sequence.
        scale: of the scores.

    Returns:
        [S, num_heads, head_dim].
    """
    if q.is_cuda:
        from legato.kernels import paged_decode_attention_triton

        return paged_decode_attention_triton.paged_decode_attention(
            q, k_cache, v_cache, plan, scale
        )
    return _on_cpu(q, k_cache, v_cache, plan, scale)


def _on_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """A sequence at a time, so that it is computed alike alone and in a batch.

    The query heads that share a KV head are the query rows of one SDPA call: K and V are read
    once. Gathering one sequence stays in the core's cache; padding the batch into one gather and
    one call was four times slower at 8 x 500 tokens.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    grouped = q.reshape(num_sequences, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs = [
        F.scaled_dot_product_attention(
            query,
            sequence.rows(k_cache, plan.block_size).transpose(0, 1)[None],
            sequence.rows(v_cache, plan.block_size).transpose(0, 1)[None],
            scale=scale,
        )
        for query, sequence in zip(grouped, plan.cpu_sequences, strict=True)
    ]
    return torch.cat(outputs).reshape(num_sequences, num_heads, head_dim)
