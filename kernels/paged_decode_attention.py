"""paged_decode_attention: one query a sequence over its pages of KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.attention_check import check_attention
from legato.kernels.kv_pages import NATIVE_DTYPES
from legato.kernels.kv_quantize import dequantize_rows
from legato.kernels.layout import require_shape

if TYPE_CHECKING:
    from legato.kernels.attention_plan import AttentionPlan, CpuSequence
    from legato.kernels.kv_pages import KvPages


def paged_decode_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q Kᵀ scale) V for the newest token of every sequence.

    Args:
        q: [S, num_heads, head_dim], any row stride, a row's heads contiguous; head h reads KV head
            h // (num_heads / num_kv_heads).
        pages: of one layer.
        plan: with one query a sequence.
        scale: of the scores.
        window: a token at position p sees the positions in (p - window, p]; None: all up to p.
        out: [S, num_heads, head_dim] of q's dtype, contiguous; made where it is None.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    require_shape(out, tuple(q.shape), "out")
    if q.is_cuda:
        from legato.kernels import paged_decode_attention_triton

        return paged_decode_attention_triton.paged_decode_attention(
            q, pages, plan, scale, window, out
        )
    if native.takes(q, out):
        launch_native("lg_paged_decode", q, pages, plan, scale, window, out)
        return out
    return _portable(q, pages, plan, scale, window, out)


def launch_native(
    name: str,
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Checks what C does not, and runs or records `lg_paged_decode` or `lg_paged_prefill`."""
    num_heads, head_dim = q.shape[1:]
    check_attention(q, pages, plan, window, out)
    if head_dim % 2:
        raise ValueError(f"q's head_dim must be even, got {head_dim}")
    table = plan.block_table
    native.launch(
        name,
        (q, pages.k, pages.v, pages.k_scale, pages.v_scale, plan.context_lens, table, out)
        + ((plan.query_starts,) if name == "lg_paged_prefill" else ()),
        (
            plan.num_sequences,
            num_heads,
            pages.num_kv_heads,
            head_dim,
            NATIVE_DTYPES[pages.dtype],
            plan.block_size,
            table.stride(0),
            q.stride(0),
            window or 0,
        ),
        (scale,),
    )  # fmt: skip


def _portable(
    q: Tensor, pages: KvPages, plan: AttentionPlan, scale: float, window: int | None, out: Tensor
) -> Tensor:
    """A sequence at a time, so that it is computed alike alone and in a batch.

    The query heads that share a KV head are the query rows of one SDPA call: K and V are read
    once.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = pages.num_kv_heads
    grouped = q.reshape(num_sequences, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for s, sequence in enumerate(plan.cpu_sequences):
        first = 0 if window is None else max(0, sequence.context_len - window)
        k, v = (rows[first:].transpose(0, 1)[None] for rows in sequence_rows(sequence, pages, q))
        attended = F.scaled_dot_product_attention(grouped[s], k, v, scale=scale)
        out[s] = attended.reshape(num_heads, head_dim)
    return out


def sequence_rows(sequence: CpuSequence, pages: KvPages, like: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, [context_len, num_kv_heads, head_dim] each, in `like`'s dtype."""
    k, v = sequence.rows(pages.k), sequence.rows(pages.v)
    if pages.k_scale is not None and pages.v_scale is not None:
        k = dequantize_rows(k, sequence.rows(pages.k_scale))
        v = dequantize_rows(v, sequence.rows(pages.v_scale))
    return k.to(like.dtype), v.to(like.dtype)
