"""Triton kernel and launcher of the gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _activate_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: int,
    x_stride: int,
    out_stride: int,
    KIND: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program for BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x_ptr += row * x_stride
    gate = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu_mul":
        value = gate * tl.sigmoid(gate)
    else:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x³).
        value = gate * tl.sigmoid(gate * (1.59576912 + 0.0713548163 * gate * gate))
    if KIND != "gelu":
        value *= tl.load(x_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, value, mask=inside)


def activate(kind: str, x: Tensor, out: Tensor) -> Tensor:
    """See kernels.gated."""
    require_contiguous_rows(x=x, out=out)
    num_tokens, width = out.shape
    if out.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _activate_kernel[grid](x, out, width, x.stride(0), out.stride(0), KIND=kind, BLOCK=_BLOCK)
    return out
