"""paged_prefill_attention: causal attention of packed prompt chunks over their pages of KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.attention_plan import CPU_TILE
from legato.kernels.layout import require_shape
from legato.kernels.paged_decode_attention import launch_native, sequence_rows

if TYPE_CHECKING:
    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages


def paged_prefill_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q Kᵀ scale + causal mask) V; a chunk sees the rows cached before it as well.

    Args:
        q: [T, num_heads, head_dim], packed, any row stride, a row's heads contiguous; head h reads
            KV head h // (num_heads / num_kv_heads).
        pages: of one layer; the chunk's own rows are in them already.
        plan: which queries and which pages belong together.
        scale: of the scores.
        window: a token at position p sees the positions in (p - window, p]; None: all up to p.
        out: [T, num_heads, head_dim] of q's dtype, contiguous; made where it is None.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    require_shape(out, tuple(q.shape), "out")
    if q.is_cuda:
        from legato.kernels import paged_prefill_attention_triton

        return paged_prefill_attention_triton.paged_prefill_attention(
            q, pages, plan, scale, window, out
        )
    if native.takes(q, out):
        launch_native("lg_paged_prefill", q, pages, plan, scale, window, out)
        return out
    return _portable(q, pages, plan, scale, window, out)


def _portable(
    q: Tensor, pages: KvPages, plan: AttentionPlan, scale: float, window: int | None, out: Tensor
) -> Tensor:
    """A sequence at a time, in tiles of CPU_TILE queries over the keys that the tile can see.

    A tile's size depends on nothing but the chunk, so a sequence is computed alike alone and
    packed.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.num_kv_heads
    group = num_heads // num_kv_heads
    # [num_kv_heads, group, T, head_dim]: KV heads act as SDPA's batch, the group as its heads.
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    for sequence in plan.cpu_sequences:
        keys, values = (rows.transpose(0, 1)[:, None] for rows in sequence_rows(sequence, pages, q))
        for start in range(sequence.query_start, sequence.query_end, CPU_TILE):
            end = min(start + CPU_TILE, sequence.query_end)
            stop = sequence.context_len - (sequence.query_end - end)  # keys seen by the last query
            first = 0 if window is None else max(0, stop - (end - start) + 1 - window)
            tile = F.scaled_dot_product_attention(
                grouped[:, :, start:end],
                # The same K for the whole group: a stride of 0, not a copy.
                keys[:, :, first:stop].expand(-1, group, -1, -1),
                values[:, :, first:stop].expand(-1, group, -1, -1),
                attn_mask=_mask(end - start, first, stop, window, q.dtype),
                scale=scale,
            )
            if end - start > 1 and not bool(tile.isfinite().all()):
                # A weight of 0 does not hide what is NaN or infinite: each query over its own keys.
                for row, last in enumerate(range(stop - (end - start) + 1, stop + 1)):
                    own = slice(0 if window is None else max(0, last - window), last)
                    tile[:, :, row] = F.scaled_dot_product_attention(
                        grouped[:, :, start + row], keys[:, 0, own], values[:, 0, own], scale=scale
                    )
            out[start:end] = tile.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim)
    return out


def _mask(
    num_queries: int, first: int, stop: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """[num_queries, stop - first]: 0 where a query sees a key, else -inf; the last query is at
    position stop - 1.
    """
    query = torch.arange(stop - num_queries, stop)[:, None]
    key = torch.arange(first, stop)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
