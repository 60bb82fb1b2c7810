"""Triton kernel and launcher of apply_rope."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _rope_kernel(
    heads_ptr: Tensor,
    tables_ptr: Tensor,
    token_stride: int,
    head_stride: int,
    HALF: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a (token, head)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    cos = tl.load(tables_ptr + token * 2 * HALF + i, mask=inside)
    sin = tl.load(tables_ptr + token * 2 * HALF + HALF + i, mask=inside)
    low_ptr = heads_ptr + token * token_stride + tl.program_id(1) * head_stride + i
    low = tl.load(low_ptr, mask=inside).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=inside).to(tl.float32)
    tl.store(low_ptr, low * cos - high * sin, mask=inside)
    tl.store(low_ptr + HALF, high * cos + low * sin, mask=inside)


def apply_rope(heads: Tensor, tables: Tensor) -> None:
    """See kernels.rope."""
    num_tokens, num_heads, head_dim = heads.shape
    _rope_kernel[(num_tokens, num_heads)](
        heads,
        tables,
        heads.stride(0),
        heads.stride(1),
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
    )
