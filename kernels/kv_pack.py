"""kv_pack and kv_unpack: rows of one layer's pages to the canonical hand-off layout and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from legato.kernels.kv_pages import KvPages


def kv_pack(pages: KvPages, slots: Tensor) -> Tensor:
    """Gathers rows: [2 (K, V), n, num_kv_heads, head_dim], contiguous, independent of blocks.

    torch's gather serves CPU and CUDA alike: it is a copy at memory speed on both.

    Args:
        pages: of one layer.
        slots: [n] int64.
    """
    data = pages.k.new_empty((2, slots.shape[0], *pages.k.shape[1:]))
    torch.index_select(pages.k, 0, slots, out=data[0])
    torch.index_select(pages.v, 0, slots, out=data[1])
    return data


def kv_unpack(data: Tensor, pages: KvPages, slots: Tensor) -> None:
    """The inverse: lands data [2, n, num_kv_heads, head_dim] at `slots` [n] int64.

    Raises:
        ValueError: shape or dtype differ from the pages'; nothing is written.
    """
    expected = (2, slots.shape[0], *pages.k.shape[1:])
    if tuple(data.shape) != expected:
        raise ValueError(f"data must have shape {expected}, got {tuple(data.shape)}")
    if data.dtype != pages.dtype:
        raise ValueError(f"data must be {pages.dtype} like the pages, got {data.dtype}")
    pages.k.index_copy_(0, slots, data[0])
    pages.v.index_copy_(0, slots, data[1])
