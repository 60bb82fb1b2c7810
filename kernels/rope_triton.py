"""Triton kernel and launcher of apply_rope."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

# Pairs that a program rotates: enough heads that it has work for its threads.
_BLOCK_PAIRS = 512


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _rope_kernel(
    heads_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    num_heads: int,
    token_stride: int,
    HALF: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK_HEADS: tl.constexpr,  # noqa: N803
    BLOCK_HALF: tl.constexpr,  # noqa: N803
) -> None:
    """One program for BLOCK_HEADS heads of a token, which share cos and sin."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    tables_ptr += token * 2 * HALF + i
    cos = tl.load(tables_ptr, mask=i < HALF)[None, :]
    sin = tl.load(tables_ptr + HALF, mask=i < HALF)[None, :]
    inside = (head < num_heads)[:, None] & (i < HALF)[None, :]
    low_ptr = heads_ptr + token * token_stride + head[:, None] * (2 * HALF) + i[None, :]
    low = tl.load(low_ptr, mask=inside).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=inside).to(tl.float32)
    tl.store(low_ptr, low * cos - high * sin, mask=inside)
    tl.store(low_ptr + HALF, high * cos + low * sin, mask=inside)


def apply_rope(heads: Tensor, tables: Tensor) -> None:
    """See kernels.rope."""
    require_contiguous_rows(heads=heads)
    require_contiguous(tables=tables)
    num_tokens, num_heads, head_dim = heads.shape
    if not heads.numel():
        return
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(max(1, _BLOCK_PAIRS // block_half), triton.next_power_of_2(num_heads))
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        heads,
        tables,
        num_heads,
        heads.stride(0),
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
    )
