"""Triton kernel and launcher of paged_decode_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages

_KEYS = 64  # keys a step: a constant, so that the order of the sum never depends on the batch


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _decode_kernel(
    q_ptr: Tensor,
    k_cache_ptr: Tensor,
    v_cache_ptr: Tensor,
    out_ptr: Tensor,
    block_table_ptr: Tensor,
    context_lens_ptr: Tensor,
    table_stride: int,
    q_stride: int,
    scale: float,
    NUM_HEADS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    GROUP_TILE: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (sequence, KV head): its group of query heads reads K and V once."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + sequence)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    member = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_TILE)
    lane = tl.arange(0, KEYS)
    head = kv_head * group + member
    q_mask = (member < group)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + sequence * q_stride + q_offset, mask=q_mask, other=0.0)
    best = tl.full([GROUP_TILE], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for start in range(0, context_len, KEYS):
        position = start + lane
        seen = position < context_len
        block = tl.load(
            block_table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=seen, other=0
        ).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
        kv_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + kv_offset, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + kv_offset, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    out_offset = sequence * NUM_HEADS * HEAD_DIM + q_offset
    tl.store(out_ptr + out_offset, acc / total[:, None], mask=q_mask)


def paged_decode_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
) -> Tensor:
    """See kernels.paged_decode_attention; a token's heads must lie together."""
    num_sequences, num_heads, head_dim = q.shape
    if q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q's heads must be contiguous, got strides {q.stride()}")
    num_kv_heads = pages.num_kv_heads
    if window is not None or pages.k_scale is not None:
        raise NotImplementedError("windows and 8-bit pages")
    _decode_kernel[(num_sequences, num_kv_heads)](
        q,
        pages.k,
        pages.v,
        out,
        plan.block_table,
        plan.context_lens,
        plan.block_table.stride(0),
        q.stride(0),
        scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        # tl.dot wants 16 rows at least.
        GROUP_TILE=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)),
        KEYS=_KEYS,
    )
    return out
