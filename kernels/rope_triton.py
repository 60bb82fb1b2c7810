"""Triton kernels and launchers of rotation_tables and apply_rope."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows, require_shape

if TYPE_CHECKING:
    from torch import Tensor

# Pairs that a program rotates: enough heads that it has work for its threads.
_BLOCK_PAIRS = 512


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _rotation_tables_kernel(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: float,
    HALF: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a token. The angle may be any size: cos and sin reduce it exactly."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    frequencies = tl.load(frequencies_ptr + i, mask=inside, other=0.0)
    angles = tl.load(positions_ptr + token).to(tl.float32) * frequencies
    out_ptr += token * 2 * HALF + i
    tl.store(out_ptr, tl.cos(angles) * scale, mask=inside)
    tl.store(out_ptr + HALF, tl.sin(angles) * scale, mask=inside)


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


def rotation_tables(
    positions: Tensor, inverse_frequencies: Tensor, out: Tensor, *, scale: float
) -> Tensor:
    """See kernels.rope."""
    half = inverse_frequencies.shape[0]
    require_shape(out, (positions.shape[0], 2, half), "out")
    require_contiguous(positions=positions, inverse_frequencies=inverse_frequencies, out=out)
    if out.numel():
        block = triton.next_power_of_2(half)
        _rotation_tables_kernel[(positions.shape[0],)](
            positions,
            inverse_frequencies,
            out,
            scale,
            HALF=half,
            BLOCK=block,
            num_warps=min(4, max(1, block // 32)),
            enable_fp_fusion=False,  # the angle is rounded before it is reduced
        )
    return out


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
