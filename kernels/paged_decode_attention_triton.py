"""Triton kernels and launcher of paged_decode_attention: split KV, merged in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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

# All of these are constants of a model's shape, never of a batch: they fix the order of the sums.
SPLIT = 256  # positions of one split: split i holds [i SPLIT, (i + 1) SPLIT)
# Part p sums the splits p, p + MAX_PARTS, ...; contexts up to 16,384 have a split a part. It bounds
# the programs and the workspace: S × MAX_PARTS × num_heads × (head_dim + 2) fp32 at most.
MAX_PARTS = 64
_MAX_GROUP_TILE = 64  # query heads a program; larger groups read K and V once for each such tile


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _part_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    best_ptr: tl.tensor,
    total_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_stride: int,
    q_stride: int,
    scale: float,
    window: int,
    NUM_HEADS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    GROUP_TILE: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    MAX_PARTS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (tile of a KV head's query heads, part, sequence): reads K and V once."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tiles: tl.constexpr = (group + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(0) // tiles
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + sequence)
    if part * SPLIT >= context_len:
        return
    first = tl.maximum(context_len - window, 0)  # the first position that is seen
    member = tl.program_id(0) % tiles * GROUP_TILE + tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_TILE)
    lane = tl.arange(0, KEYS)
    head = kv_head * group + member
    head_mask = member < group
    q_mask = head_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + sequence * q_stride + q_offset, mask=q_mask, other=0.0)
    best = tl.full([GROUP_TILE], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for split in range(part * SPLIT, context_len, MAX_PARTS * SPLIT):
        end = tl.minimum(split + SPLIT, context_len)
        for start in range(tl.maximum(split, first // KEYS * KEYS), end, KEYS):
            position = start + lane
            inside = (position >= first) & (position < end)
            slot = slots_of(block_table_ptr + sequence * table_stride, position, inside, BLOCK_SIZE)
            best, total, acc = attend(
                q,
                k_ptr,
                v_ptr,
                k_scale_ptr,
                v_scale_ptr,
                slot,
                inside,
                inside[None, :],
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
    row = (sequence * tl.num_programs(1) + part) * NUM_HEADS + head
    tl.store(best_ptr + row, best, mask=head_mask)
    tl.store(total_ptr + row, total, mask=head_mask)
    # A part left of the window has seen nothing: its sums are not read.
    acc_mask = q_mask & (best > -float("inf"))[:, None]
    tl.store(acc_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=acc_mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _merge_kernel(
    acc_ptr: tl.tensor,
    best_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_parts: int,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    MAX_PARTS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (head, sequence): all parts at once, as many as there can be, in one order."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0)
    context_len = tl.load(context_lens_ptr + sequence)
    part = tl.arange(0, MAX_PARTS)
    dim = tl.arange(0, DIM_TILE)
    row = (sequence * num_parts + part) * num_heads + head
    # Part 0 always has work where there is a context: its programs wrote what is read here.
    written = part * SPLIT < context_len
    best = tl.load(best_ptr + row, mask=written, other=-float("inf"))
    has_keys = best > -float("inf")
    total = tl.load(total_ptr + row, mask=has_keys, other=0.0)
    mask = has_keys[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.load(acc_ptr + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    # A row without context, as padding has, gives zeros.
    base = tl.where(context_len > 0, tl.max(best, axis=0), 0.0)
    weights = tl.exp2(best - base)
    total_sum = tl.sum(total * weights, axis=0)
    acc_sum = tl.sum(acc * weights[:, None], axis=0)
    result = acc_sum / tl.where(context_len > 0, total_sum, 1.0)
    out_offset = (sequence * num_heads + head) * HEAD_DIM + dim
    tl.store(out_ptr + out_offset, result, mask=dim < HEAD_DIM)


def paged_decode_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
) -> Tensor:
    """See kernels.paged_decode_attention.

    Reads no tensor on the host, so a CUDA graph may hold it: the number of parts follows from the
    width of the block table, and programs beyond a context end at once.
    """
    check_attention(q, pages, plan, window, out)
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = pages.num_kv_heads
    num_parts = min(MAX_PARTS, triton.cdiv(plan.block_table.shape[1] * plan.block_size, SPLIT))
    acc = torch.empty(
        (num_sequences, num_parts, num_heads, head_dim), dtype=torch.float32, device=q.device
    )
    best, total = torch.empty(
        (2, num_sequences, num_parts, num_heads), dtype=torch.float32, device=q.device
    )
    group = num_heads // num_kv_heads
    # tl.dot wants 16 rows at least.
    group_tile = min(max(16, triton.next_power_of_2(group)), _MAX_GROUP_TILE)
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    keys, num_warps, num_stages = steps(dim_tile, q.element_size(), pages.k.element_size())
    _part_kernel[(num_kv_heads * triton.cdiv(group, group_tile), num_parts, num_sequences)](
        q,
        *page_pointers(pages),
        acc,
        best,
        total,
        plan.block_table,
        plan.context_lens,
        plan.block_table.stride(0),
        q.stride(0),
        scale * LOG2_E,
        NO_WINDOW if window is None else window,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=plan.block_size,
        ROWS=rows_kind(pages),
        GROUP_TILE=group_tile,
        DIM_TILE=dim_tile,
        KEYS=keys,
        SPLIT=SPLIT,
        MAX_PARTS=MAX_PARTS,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _merge_kernel[(num_heads, num_sequences)](
        acc,
        best,
        total,
        out,
        plan.context_lens,
        num_parts,
        HEAD_DIM=head_dim,
        DIM_TILE=dim_tile,
        SPLIT=SPLIT,
        MAX_PARTS=MAX_PARTS,
        num_warps=4 if dim_tile <= 128 else 8,
    )
    return out


def steps(dim_tile: int, element_size: int, row_size: int) -> tuple[int, int, int]:
    """Keys a step, warps and stages: by shape and dtype alone, like every sum's order.

    Chosen so that nothing spills and shared memory stays under 99 KiB with two steps' K and V on
    their way; not tuned on a GPU.

    Args:
        dim_tile: head_dim rounded up.
        element_size: bytes of one of q's elements.
        row_size: bytes of one of the pages' elements.
    """
    # Two of five stages go to the block table, which has to be read before K and V can be.
    if element_size < 4:
        return 64 if dim_tile <= 128 else 32, 4, 5
    # No tensor cores: "ieee" products run as FMAs out of registers. Converted rows that come
    # through the pipeline are held there whole: no stages.
    num_stages = 1 if row_size < 4 else 5
    return 32 if dim_tile <= 128 else 16, 4 if dim_tile <= 64 else 8, num_stages
