"""kv_scatter: writes new rows of K and V to their slots in one layer's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kv_scatter(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k_cache[slots] = k and v_cache[slots] = v.

    Args:
        k, v: [T, num_kv_heads, head_dim], any row stride.
        k_cache, v_cache: [num_slots, num_kv_heads, head_dim], contiguous, of the same dtype.
        slots: [T] int64, all different.
    """
    if k.is_cuda:
        from legato.kernels import kv_scatter_triton

        kv_scatter_triton.kv_scatter(k, v, k_cache, v_cache, slots)
        return
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
