"""Triton kernel and launchers of rms_norm and add_rms_norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _rms_norm_kernel(
    x_ptr: Tensor,
    residual_ptr: Tensor,
    weight_ptr: Tensor,
    out_ptr: Tensor,
    width: int,
    eps: float,
    ADD: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row; the whole row in registers."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        # Rounded to the residual's dtype before it is squared: what later layers read.
        residual = (wide + before.to(tl.float32)).to(before.dtype)
        tl.store(residual_ptr + row + columns, residual, mask=inside)
        wide = residual.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, wide * scale * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See kernels.rms_norm."""
    return _launch(x.contiguous(), None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See kernels.rms_norm; `residual` must be contiguous, it is written in place."""
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got strides {residual.stride()}")
    return _launch(x.contiguous(), residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    num_tokens, width = x.shape
    _rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        width,
        eps,
        ADD=residual is not None,
        BLOCK=triton.next_power_of_2(width),
    )
    return out
