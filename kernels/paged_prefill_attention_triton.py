"""Triton kernel and launcher of paged_prefill_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages

_QUERIES = 32  # queries a program
_KEYS = 32  # keys a step: a constant, so that the order of the sum never depends on the batch


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _prefill_kernel(
    q_ptr: Tensor,
    k_cache_ptr: Tensor,
    v_cache_ptr: Tensor,
    out_ptr: Tensor,
    block_table_ptr: Tensor,
    context_lens_ptr: Tensor,
    query_starts_ptr: Tensor,
    table_stride: int,
    q_stride: int,
    scale: float,
    NUM_HEADS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (tile of one sequence's queries, head)."""
    sequence = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * QUERIES
    head = tl.program_id(2)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    context_len = tl.load(context_lens_ptr + sequence)
    query_start = tl.load(query_starts_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if offset >= num_queries:
        return
    query = offset + tl.arange(0, QUERIES)
    query_position = context_len - num_queries + query
    dim = tl.arange(0, DIM_TILE)
    lane = tl.arange(0, KEYS)
    q_mask = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = (query_start + query)[:, None] * q_stride + head * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)
    best = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_TILE], tl.float32)
    end = tl.minimum(context_len, context_len - num_queries + offset + QUERIES)
    # Every query sees key 0, so no row's maximum is -inf after the first step.
    for start in range(0, end, KEYS):
        position = start + lane
        inside = position < end
        block = tl.load(
            block_table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=inside, other=0
        ).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
        kv_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + kv_offset, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + kv_offset, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = inside[None, :] & (position[None, :] <= query_position[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    out_offset = ((query_start + query)[:, None] * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + out_offset, acc / total[:, None], mask=q_mask)


def paged_prefill_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
) -> Tensor:
    """See kernels.paged_prefill_attention; a token's heads must lie together."""
    _, num_heads, head_dim = q.shape
    if q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q's heads must be contiguous, got strides {q.stride()}")
    if window is not None or pages.k_scale is not None:
        raise NotImplementedError("windows and 8-bit pages")
    _prefill_kernel[(plan.num_sequences, triton.cdiv(plan.max_queries, _QUERIES), num_heads)](
        q,
        pages.k,
        pages.v,
        out,
        plan.block_table,
        plan.context_lens,
        plan.query_starts,
        plan.block_table.stride(0),
        q.stride(0),
        scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)),
        QUERIES=_QUERIES,
        KEYS=_KEYS,
    )
    return out
