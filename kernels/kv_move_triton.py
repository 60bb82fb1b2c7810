"""Triton kernel that moves rows of K and V between dtypes: kv_scatter's, kv_pack's, kv_unpack's.

It makes the bits that `kernels.kv_quantize` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels.kv_pages import QUANTIZED_DTYPES
from legato.kernels.layout import require_contiguous, require_shape
from legato.kernels.paged_rows_triton import e4m3_bits_to_half

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 16  # heads a program, at most
_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}  # others: "float"


@dataclass(frozen=True)
class Rows:
    """K and V rows [n, num_kv_heads, head_dim]; 8-bit ones with scales [n, num_kv_heads] fp32."""

    name: str  # in errors
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _to_e4m3(x: tl.tensor) -> tl.tensor:
    """fp32 of at most 448 to the bits of e4m3, to the nearest, ties to even.

    By integers, as Triton has the dtype from compute capability 8.9 on only.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 2^14 in fp32 has the step of e4m3's subnormals, 2^-9: the sum rounds to it.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    small -= 0x46800000  # 2^14
    # 20 bits of mantissa go; the exponent's bias goes from 127 to 7.
    large = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (((bits >> 24) & 0x80) | tl.where(magnitude < (121 << 23), small, large)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _move(
    from_ptr: tl.tensor,
    from_scale_ptr: tl.tensor,
    to_ptr: tl.tensor,
    to_scale_ptr: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    from_stride: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    HEAD_DIM: tl.constexpr,  # noqa: N803
    FROM: tl.constexpr,  # noqa: N803  # "float", "int8" or "e4m3"
    TO: tl.constexpr,  # noqa: N803
    HEAD_TILE: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Some heads of one row."""
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    dim = tl.arange(0, DIM_TILE)
    head_mask = head < HEADS
    mask = head_mask[:, None] & (dim < HEAD_DIM)[None, :]
    offset = head[:, None] * HEAD_DIM + dim[None, :]
    x = tl.load(from_ptr + source * from_stride + offset, mask=mask, other=0)
    to_row = to_ptr + target * HEADS * HEAD_DIM + offset
    if FROM == "float" and TO == "float":
        tl.store(to_row, x.to(to_ptr.dtype.element_ty), mask=mask)
    else:
        if FROM != "float":
            scale = tl.load(from_scale_ptr + source * HEADS + head, mask=head_mask, other=0.0)
        if FROM == TO:
            tl.store(to_row, x, mask=mask)
            tl.store(to_scale_ptr + target * HEADS + head, scale, mask=head_mask)
        else:
            if FROM == "e4m3":
                x = e4m3_bits_to_half(x)
                scale *= 256.0
            wide = x.to(tl.float32)
            if FROM != "float":
                wide = wide * scale[:, None]
            if TO == "float":
                tl.store(to_row, wide.to(to_ptr.dtype.element_ty), mask=mask)
            else:
                largest: tl.constexpr = 127.0 if TO == "int8" else 448.0
                new_scale = tl.div_rn(
                    tl.max(tl.abs(wide), axis=1), tl.full([HEAD_TILE], largest, tl.float32)
                )
                new_scale = tl.where(new_scale < 1.1754943508222875e-38, 0.0, new_scale)
                has_scale = new_scale > 0
                one = tl.full([HEAD_TILE], 1.0, tl.float32)
                inverse = tl.div_rn(one, tl.where(has_scale, new_scale, 1.0))
                scaled = wide * tl.where(has_scale, inverse, 0.0)[:, None]
                if TO == "int8":
                    # 1.5 2^23 has a step of 1: the sum rounds to the nearest, ties to even.
                    scaled = (scaled + 12582912.0) - 12582912.0
                    scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
                    tl.store(to_row, scaled.to(tl.int8), mask=mask)
                else:
                    tl.store(to_row, _to_e4m3(scaled), mask=mask)
                tl.store(to_scale_ptr + target * HEADS + head, new_scale, mask=head_mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _move_kernel(
    k_from_ptr: tl.tensor,
    v_from_ptr: tl.tensor,
    k_from_scale_ptr: tl.tensor,
    v_from_scale_ptr: tl.tensor,
    k_to_ptr: tl.tensor,
    v_to_ptr: tl.tensor,
    k_to_scale_ptr: tl.tensor,
    v_to_scale_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_stride: int,
    v_stride: int,
    GATHER: tl.constexpr,  # noqa: N803  # the slots are those of the source, else of the target
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    FROM: tl.constexpr,  # noqa: N803
    TO: tl.constexpr,  # noqa: N803
    HEAD_TILE: tl.constexpr,  # noqa: N803
    DIM_TILE: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (row, tile of heads); offsets in int64, for pools beyond 2^31 elements."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if GATHER:
        source, target = slot, row
    else:
        source, target = row, slot
    _move(
        k_from_ptr,
        k_from_scale_ptr,
        k_to_ptr,
        k_to_scale_ptr,
        source,
        target,
        k_stride,
        HEADS,
        HEAD_DIM,
        FROM,
        TO,
        HEAD_TILE,
        DIM_TILE,
    )
    _move(
        v_from_ptr,
        v_from_scale_ptr,
        v_to_ptr,
        v_to_scale_ptr,
        source,
        target,
        v_stride,
        HEADS,
        HEAD_DIM,
        FROM,
        TO,
        HEAD_TILE,
        DIM_TILE,
    )


def move(source: Rows, target: Rows, slots: Tensor, *, gather: bool) -> None:
    """Row slots[i] of `source` to row i of `target`, or row i to row slots[i] without `gather`.

    Raises:
        ValueError: naming the tensor whose shape, strides or dtype do not fit; nothing is written.
    """
    heads, head_dim = (source if gather else target).k.shape[1:]
    for rows, indexed in ((source, gather), (target, not gather)):
        _check(rows, heads, head_dim, None if indexed else slots.shape[0])
    require_contiguous(**{f"{target.name}k": target.k, f"{target.name}v": target.v})
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        raise ValueError(f"slots must be [n] integers, got {slots.dtype}, {tuple(slots.shape)}")
    require_contiguous(slots=slots)
    head_tile = min(_HEADS, triton.next_power_of_2(heads))
    _move_kernel[(slots.shape[0], triton.cdiv(heads, head_tile))](
        *_pointers(source),
        *_pointers(target),
        slots,
        source.k.stride(0),
        source.v.stride(0),
        GATHER=gather,
        HEADS=heads,
        HEAD_DIM=head_dim,
        FROM=_KINDS.get(source.k.dtype, "float"),
        TO=_KINDS.get(target.k.dtype, "float"),
        HEAD_TILE=head_tile,
        DIM_TILE=triton.next_power_of_2(head_dim),
        num_warps=4,
        # A product and the sum that rounds it must not become one fused operation.
        enable_fp_fusion=False,
    )


def _check(rows: Rows, heads: int, head_dim: int, num_rows: int | None) -> None:
    """`num_rows` None: as many as there are."""
    num_rows = rows.k.shape[0] if num_rows is None else num_rows
    quantized = rows.k.dtype in QUANTIZED_DTYPES
    for name, tensor in (("k", rows.k), ("v", rows.v)):
        require_shape(tensor, (num_rows, heads, head_dim), rows.name + name)
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{rows.name}{name}'s heads must be contiguous, got strides {tensor.stride()}"
            )
    if rows.v.dtype != rows.k.dtype:
        raise ValueError(f"{rows.name}v must be {rows.k.dtype} like k, got {rows.v.dtype}")
    for name, scales in (("k_scale", rows.k_scale), ("v_scale", rows.v_scale)):
        name = rows.name + name
        if (scales is not None) != quantized:
            raise ValueError(f"{name}: exactly 8-bit rows have scales, got {rows.k.dtype}")
        if scales is not None:
            require_shape(scales, (num_rows, heads), name)
            require_contiguous(**{name: scales})
            if scales.dtype != torch.float32:
                raise ValueError(f"{name} must be torch.float32, got {scales.dtype}")


def _pointers(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e4m3 as bytes; anything where there are no scales."""
    k, v = rows.k, rows.v
    if k.dtype == torch.float8_e4m3fn:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return (
        k,
        v,
        k if rows.k_scale is None else rows.k_scale,
        v if rows.v_scale is None else rows.v_scale,
    )
