"""kv_pack and kv_unpack: rows of one layer's pages to the canonical hand-off layout and back."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_pack(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Gathers rows: [2 (K, V), n, num_kv_heads, head_dim], contiguous, independent of blocks.

    torch's gather serves CPU and CUDA alike: it is a copy at memory speed on both.

    Args:
        k_cache, v_cache: [num_slots, num_kv_heads, head_dim].
        slots: [n] int64.
    """
    data = k_cache.new_empty((2, slots.shape[0], *k_cache.shape[1:]))
    torch.index_select(k_cache, 0, slots, out=data[0])
    torch.index_select(v_cache, 0, slots, out=data[1])
    return data


def kv_unpack(data: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """The inverse: lands data [2, n, num_kv_heads, head_dim] at `slots` [n] int64.

    Raises:
        ValueError: shape or dtype differ from the pages'; nothing is written.
    """
    expected = (2, slots.shape[0], *k_cache.shape[1:])
    if tuple(data.shape) != expected:
        raise ValueError(f"data must have shape {expected}, got {tuple(data.shape)}")
    if data.dtype != k_cache.dtype:
        raise ValueError(f"data must be {k_cache.dtype} like the pages, got {data.dtype}")
    k_cache.index_copy_(0, slots, data[0])
    v_cache.index_copy_(0, slots, data[1])
