"""Triton kernel and launchers of rms_norm, add_rms_norm and rms_norm_add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: int,
    heads: int,
    x_stride: int,
    out_stride: int,
    eps: float,
    ADD: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row, or a head of a row; all of it in registers.

    ADD "before": residual += x, then out = norm(residual). "after": residual += norm(x), and no
    out. "no": out = norm(x). The residual's rows are contiguous.
    """
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x_at = row * x_stride + head * width + columns
    residual_at = row * width + columns
    wide = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    if ADD == "before":
        before = tl.load(residual_ptr + residual_at, mask=inside, other=0.0)
        # Rounded to the residual's dtype before it is squared: what later layers read.
        residual = (wide + before.to(tl.float32)).to(before.dtype)
        tl.store(residual_ptr + residual_at, residual, mask=inside)
        wide = residual.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    value = wide * scale * weight
    if ADD == "after":
        before = tl.load(residual_ptr + residual_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + residual_at, before + value, mask=inside)
    else:
        tl.store(out_ptr + row * out_stride + head * width + columns, value, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See kernels.rms_norm."""
    require_contiguous_rows(x=x, out=out)
    return _launch(x, x, weight, eps, out, "no")


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See kernels.rms_norm."""
    require_contiguous(x=x, residual=residual, out=out)
    return _launch(x, residual, weight, eps, out, "before")


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """See kernels.rms_norm."""
    require_contiguous(x=x, residual=residual)
    _launch(x, residual, weight, eps, x, "after")


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, add: str
) -> Tensor:
    heads = 1 if x.dim() == 2 else x.shape[1]
    width = x.shape[-1]
    require_contiguous(weight=weight)
    if x.numel():
        _rms_norm_kernel[(x.shape[0] * heads,)](
            x,
            residual,
            weight,
            out,
            width,
            heads,
            x.stride(0),
            out.stride(0),
            eps,
            ADD=add,
            BLOCK=triton.next_power_of_2(width),
            num_warps=num_warps(width),
        )
    return out


def num_warps(width: int) -> int:
    """Of a program that holds a row: some 16 elements a thread; a function of the width alone."""
    return min(16, 1 << ((width - 1) // 512).bit_length())
