"""rope: rotary position embedding in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_tables(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """What `apply_rope` multiplies with, once a forward: [2, T, head_dim].

    [0] is cos twice over; [1] is (-sin, sin), so that the rotation is
    x * cos + swap_halves(x) * [1]. Angles are computed in fp32 from the positions at hand: there
    is no table whose end a long prompt could run over.

    Args:
        positions: [T] int64.
        inverse_frequencies: [head_dim / 2] fp32.
        dtype: of the result.
    """
    angles = positions.to(torch.float32)[:, None] * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)


def apply_rope(heads: Tensor, tables: Tensor) -> None:
    """Rotates heads [T, num_heads, head_dim] in place; query and key heads go in together.

    Args:
        heads: any strides; the last one is 1.
        tables: from `rotation_tables`, [2, T, head_dim].
    """
    if heads.is_cuda:
        from legato.kernels import rope_triton

        rope_triton.apply_rope(heads, tables)
        return
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    heads.mul_(tables[0, :, None]).addcmul_(swapped, tables[1, :, None])
