"""Triton kernel and launcher of silu_mul."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _silu_mul_kernel(
    gate_up_ptr: Tensor,
    out_ptr: Tensor,
    width: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> None:
    """One program for BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptr = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels.silu_mul."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK)
    return out
