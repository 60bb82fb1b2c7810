"""Triton kernels and launcher of take_rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows
from legato.kernels.weight import QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _take_rows_kernel(
    table_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: int,
    table_stride: int,
    groups: int,
    group_size: int,
    scale: float,
    BITS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    ADD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program for BLOCK columns of a row. BITS 0: a plain table; else see QuantizedWeight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    index = tl.load(indices_ptr + row)
    table_ptr += index * table_stride
    if BITS == 4:
        pairs = tl.load(table_ptr + columns // 2, mask=inside, other=0)
        value = ((pairs >> ((columns & 1) * 4).to(tl.uint8)) & 15).to(tl.float32)
    else:
        value = tl.load(table_ptr + columns, mask=inside, other=0).to(tl.float32)
    if BITS > 0:
        group = index * groups + columns // group_size
        value *= tl.load(scales_ptr + group, mask=inside, other=0.0)
        value += tl.load(offsets_ptr + group, mask=inside, other=0.0)
    value *= scale
    out_ptr += row * width + columns
    if ADD:
        value += tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr, value, mask=inside)


def take_rows(
    table: Tensor | QuantizedWeight, indices: Tensor, out: Tensor, *, scale: float, add: bool
) -> Tensor:
    """See kernels.rows."""
    require_contiguous(out=out, indices=indices)
    num_rows, width = out.shape
    if isinstance(table, QuantizedWeight):
        values, scales, offsets = table.values, table.scales, table.offsets
        require_contiguous(values=values, scales=scales, offsets=offsets)
        bits, groups, group_size = table.bits, scales.shape[1], table.group_size
    else:
        require_contiguous_rows(table=table)
        values = scales = offsets = table
        bits, groups, group_size = 0, 1, width
    if out.numel():
        _take_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            values,
            scales,
            offsets,
            indices,
            out,
            width,
            values.stride(0),
            groups,
            group_size,
            scale,
            BITS=bits,
            ADD=add,
            BLOCK=_BLOCK,
        )
    return out
