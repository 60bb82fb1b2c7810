"""rope: rotary position embedding in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import (
    require_contiguous,
    require_contiguous_rows,
    require_dtype,
    require_shape,
)


def rotation_tables(
    positions: Tensor, inverse_frequencies: Tensor, out: Tensor, *, scale: float = 1.0
) -> Tensor:
    """What `apply_rope` multiplies with, once a forward: cos, then sin, of every angle.

    Angles are computed in fp32 from the positions at hand: there is no table whose end a long
    prompt could run over.

    Args:
        positions: [T] int64.
        inverse_frequencies: [head_dim / 2] fp32.
        out: [T, 2, head_dim / 2] fp32.
        scale: of cos and sin (YaRN's attention factor).
    """
    half = inverse_frequencies.shape[0]
    require_shape(out, (positions.shape[0], 2, half), "out")
    require_dtype(positions, torch.int64, "positions")
    require_dtype(inverse_frequencies, torch.float32, "inverse_frequencies")
    require_dtype(out, torch.float32, "out")
    require_contiguous(positions=positions, out=out, inverse_frequencies=inverse_frequencies)
    if out.is_cuda:
        from legato.kernels import rope_triton

        return rope_triton.rotation_tables(positions, inverse_frequencies, out, scale=scale)
    if native.takes(inverse_frequencies, out):
        sizes = (positions.shape[0], half)
        native.launch("lg_rotation_tables", (positions, inverse_frequencies, out), sizes, (scale,))
        return out
    angles = positions.to(torch.float32)[:, None] * inverse_frequencies
    torch.mul(angles.cos(), scale, out=out[:, 0])
    torch.mul(angles.sin(), scale, out=out[:, 1])
    return out


def apply_rope(heads: Tensor, tables: Tensor) -> None:
    """Rotates heads [T, num_heads, head_dim] in place; query and key heads go in together.

    Args:
        heads: any row stride; a token's heads are contiguous.
        tables: from `rotation_tables`, [T, 2, head_dim / 2] fp32.
    """
    num_tokens, num_heads, head_dim = heads.shape
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    require_shape(tables, (num_tokens, 2, head_dim // 2), "tables")
    require_contiguous_rows(heads=heads)
    if heads.is_cuda:
        from legato.kernels import rope_triton

        rope_triton.apply_rope(heads, tables)
        return
    if native.takes(heads, tables):
        require_contiguous(tables=tables)
        sizes = (num_tokens, num_heads, head_dim // 2, heads.stride(0))
        native.launch("lg_rope", (heads, tables), sizes)
        return
    cos, sin = tables[:, None, 0], tables[:, None, 1]
    low, high = heads.float().chunk(2, -1)
    heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))
