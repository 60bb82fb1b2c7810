"""Triton kernel and launcher of layer_norm and add_layer_norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous
from legato.kernels.rms_norm_triton import num_warps

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _layer_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: int,
    eps: float,
    ADD: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row, all of it in registers: the variance is of the differences, not of squares
    that cancel.
    """
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        residual = (wide + before.to(tl.float32)).to(before.dtype)
        tl.store(residual_ptr + row + columns, residual, mask=inside)
        wide = residual.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, centred * scale * weight + bias, mask=inside)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, out: Tensor
) -> Tensor:
    """See kernels.layer_norm; with a `residual`, add_layer_norm."""
    require_contiguous(x=x, weight=weight, bias=bias, out=out)
    if residual is not None:
        require_contiguous(residual=residual)
    num_tokens, width = x.shape
    if x.numel():
        _layer_norm_kernel[(num_tokens,)](
            x,
            x if residual is None else residual,
            weight,
            bias,
            out,
            width,
            eps,
            ADD=residual is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps(width),
        )
    return out
