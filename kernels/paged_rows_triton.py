"""What the Triton attention kernels share: a page's rows by position, 8-bit rows as numbers, and
the check before a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels import attention_check

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages

MAX_HEAD_DIM = 256
NO_WINDOW = 2**31 - 1  # a window that no context exceeds: it spares the kernels a second variant
LOG2_E = 1.4426950408889634  # softmax in powers of two: exp(x) = exp2(x log2 e)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def slots_of(
    block_table_ptr: tl.tensor,
    position: tl.tensor,
    inside: tl.tensor,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> tl.tensor:
    """Positions of one sequence [KEYS] to slots in int64: a pool may have more than 2^31 elements.

    The pointer is that of the sequence's row of the block table.
    """
    block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=inside, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def e4m3_bits_to_half(rows: tl.tensor) -> tl.tensor:
    """e4m3 as bytes to a 256th of the values, in fp16 and exactly, subnormals included.

    Both have a sign and an exponent before the mantissa; their biases are 7 and 15, and 2^8 apart.
    """
    bits = rows.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def load_rows(
    rows_ptr: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803  # "float", "int8", "e4m3" or "e4m3_bits"
) -> tl.tensor:
    """One head's rows [KEYS, DIM_TILE], zeros beyond; 8-bit rows without their scales, exactly.

    e4m3 comes as fp16. "e4m3_bits" is for GPUs before 8.9, for which Triton has no such dtype.
    """
    dim = tl.arange(0, DIM_TILE)
    offset = (slot[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
    rows = tl.load(rows_ptr + offset, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    if ROWS == "int8":
        rows = rows.to(tl.float32)
    elif ROWS == "e4m3":
        rows = rows.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif ROWS == "e4m3_bits":
        rows = e4m3_bits_to_half(rows)
    return rows


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def load_scales(
    scales_ptr: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """What `load_rows` has to be multiplied by: [KEYS] fp32."""
    scales = tl.load(scales_ptr + slot * NUM_KV_HEADS + kv_head, mask=inside, other=0.0)
    if ROWS == "e4m3_bits":
        scales *= 256.0
    return scales


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def attend(
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    seen: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of online softmax: queries [M, DIM_TILE] over the keys of `slot` [KEYS].

    A key that a query does not see (`seen` [M, KEYS]) leaves its three sums as they are, to the
    bit: which of them share a step changes nothing.
    """
    k = load_rows(k_ptr, slot, inside, kv_head, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, ROWS)
    v = load_rows(v_ptr, slot, inside, kv_head, NUM_KV_HEADS, HEAD_DIM, DIM_TILE, ROWS)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if ROWS != "float":
        k_scale = load_scales(k_scale_ptr, slot, inside, kv_head, NUM_KV_HEADS, ROWS)
        v_scale = load_scales(v_scale_ptr, slot, inside, kv_head, NUM_KV_HEADS, ROWS)
        scores *= k_scale[None, :]
        v = v.to(tl.float32) * v_scale[:, None]
    scores = tl.where(seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no maximum, and inf - inf is no number.
    base = tl.where(new_best == -float("inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(
        weights.to(q.dtype), v.to(q.dtype), acc=acc * shrink[:, None], input_precision="ieee"
    )
    return new_best, total, acc


def rows_kind(pages: KvPages) -> str:
    """The kernels' ROWS."""
    if pages.dtype == torch.int8:
        return "int8"
    if pages.dtype == torch.float8_e4m3fn:
        return "e4m3" if has_e4m3(pages.k.device) else "e4m3_bits"
    return "float"


def has_e4m3(device: torch.device) -> bool:
    """Whether Triton converts e4m3 on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def page_pointers(pages: KvPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, V and their scales as the kernels take them: e4m3 as bytes, no scales as anything."""
    k, v = pages.k, pages.v
    if pages.dtype == torch.float8_e4m3fn:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return (
        k,
        v,
        k if pages.k_scale is None else pages.k_scale,
        (v if pages.v_scale is None else pages.v_scale),
    )


def check_attention(
    q: Tensor, pages: KvPages, plan: AttentionPlan, window: int | None, out: Tensor
) -> None:
    """As `kernels.attention_check`, and that a head fits."""
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"q's head_dim must be at most {MAX_HEAD_DIM}, got {q.shape[-1]}")
    attention_check.check_attention(q, pages, plan, window, out)
