"""Triton kernel and launcher of linear for float weights, with one order of sums for every batch.

cuBLAS picks its kernel, and with it the order in which a row's products are added, by the number
of rows: a request's last bits depend on its neighbours. Here the tiles are constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

# Never tuned on a GPU. Changing one changes the order of sums, and so the last bits of answers.
_ROWS, _COLUMNS, _DEPTH = 32, 64, 32


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    depth: int,
    x_stride: int,
    HAS_BIAS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
) -> None:
    """One program a tile of the output; the whole depth in order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row_inside, column_inside = row < num_rows, column < num_columns
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + k < depth
        x = tl.load(
            x_ptr + row[:, None] * x_stride + (start + k)[None, :],
            mask=row_inside[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + column[:, None] * depth + (start + k)[None, :],
            mask=column_inside[:, None] & inside[None, :],
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * num_columns + column[None, :],
        acc,
        mask=row_inside[:, None] & column_inside[None, :],
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """See kernels.linear."""
    require_contiguous_rows(x=x)
    require_contiguous(weight=weight, out=out)
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS))
    if num_rows:
        _linear_kernel[grid](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            num_columns,
            depth,
            x.stride(0),
            HAS_BIAS=bias is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
        )
    return out
