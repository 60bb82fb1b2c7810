"""Triton kernel and launcher of paged_prefill_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.paged_rows_triton import (
    LOG2_E,
    NO_WINDOW,
    attend,
    check_attention,
    page_pointers,
    rows_kind,
    slots_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    table_stride: int,
    q_stride: int,
    scale: float,
    window: int,
    NUM_HEADS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (head, tile of one sequence's queries, sequence).

    Heads come first, so that those which read the same K and V run side by side. Key tiles lie at
    multiples of KEYS of the position: how a prompt is cut into chunks does not change a query.
    """
    head = tl.program_id(0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    # The last tiles see the most keys: they go first.
    offset = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    sequence = tl.program_id(2).to(tl.int64)
    query_start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if offset >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    query = offset + tl.arange(0, QUERIES)
    query_position = context_len - num_queries + query
    dim = tl.arange(0, DIM_TILE)
    lane = tl.arange(0, KEYS)
    token = query_start.to(tl.int64) + query
    q_mask = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = token[:, None] * q_stride + head * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)
    best = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_TILE], tl.float32)
    tile_start = context_len - num_queries + offset  # position of the tile's first query
    first = tl.maximum(tile_start + 1 - window, 0)  # the first position that any of them sees
    end = tl.minimum(context_len, tile_start + QUERIES)
    for start in range(first // KEYS * KEYS, end, KEYS):
        position = start + lane
        inside = (position >= first) & (position < end)
        ahead = query_position[:, None] - position[None, :]
        slot = slots_of(block_table_ptr + sequence * table_stride, position, inside, BLOCK_SIZE)
        best, total, acc = attend(
            q,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            slot,
            inside,
            inside[None, :] & (ahead >= 0) & (ahead < window),
            kv_head,
            scale,
            best,
            total,
            acc,
            NUM_KV_HEADS,
            HEAD_DIM,
            DIM_TILE,
            ROWS,
        )
    out_offset = (token[:, None] * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
    # Every query sees its own position; rows beyond the last query may have seen nothing.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + out_offset, result, mask=q_mask)


def paged_prefill_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
) -> Tensor:
    """See kernels.paged_prefill_attention; reads no tensor on the host."""
    check_attention(q, pages, plan, window, out)
    _, num_heads, head_dim = q.shape
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    queries, keys, num_warps, num_stages = tiles(dim_tile, q.element_size(), pages.k.element_size())
    _prefill_kernel[(num_heads, triton.cdiv(plan.max_queries, queries), plan.num_sequences)](
        q,
        *page_pointers(pages),
        out,
        plan.block_table,
        plan.context_lens,
        plan.query_starts,
        plan.block_table.stride(0),
        q.stride(0),
        scale * LOG2_E,
        NO_WINDOW if window is None else window,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        ROWS=rows_kind(pages),
        DIM_TILE=dim_tile,
        QUERIES=queries,
        KEYS=keys,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def tiles(dim_tile: int, element_size: int, row_size: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, stages: by shape and dtype alone, like every sum's order.

    Chosen so that nothing spills and shared memory stays under 99 KiB; not tuned on a GPU.

    Args:
        dim_tile: head_dim rounded up.
        element_size: bytes of one of q's elements.
        row_size: bytes of one of the pages' elements.
    """
    if element_size == 4:  # no tensor cores: "ieee" products run as FMAs out of registers
        # Converted rows that come through the pipeline are held in registers whole: no stages.
        num_stages = 1 if row_size < 4 else 2
        if dim_tile > 128:
            return 16 if row_size == 2 else 32, 16, 8, num_stages
        return 32, 32 if dim_tile <= 64 else 16, 8, num_stages
    # Two of five stages go to the block table, which has to be read before K and V can be.
    if dim_tile > 128:
        return 64, 32, 8, 4  # a fifth would take 100 KiB
    if row_size == 1:  # what the conversion holds in registers has to fit as well
        return 128, 32, 8, 5
    return 128, 64, 8, 5
