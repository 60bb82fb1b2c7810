"""Triton kernel and launcher of kv_scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.kv_pages import KvPages


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _kv_scatter_kernel(
    k_ptr: Tensor,
    v_ptr: Tensor,
    k_cache_ptr: Tensor,
    v_cache_ptr: Tensor,
    slots_ptr: Tensor,
    k_stride: int,
    v_stride: int,
    WIDTH: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program a token; offsets in int64, for pools of more than 2^31 elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    tl.store(
        k_cache_ptr + slot * WIDTH + i, tl.load(k_ptr + token * k_stride + i, mask=inside), inside
    )
    tl.store(
        v_cache_ptr + slot * WIDTH + i, tl.load(v_ptr + token * v_stride + i, mask=inside), inside
    )


def kv_scatter(k: Tensor, v: Tensor, pages: KvPages, slots: Tensor) -> None:
    """See kernels.kv_scatter; a token's heads must lie together."""
    num_tokens, num_kv_heads, head_dim = k.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"{name}'s heads must be contiguous, got strides {tensor.stride()}")
    if pages.k_scale is not None:
        raise NotImplementedError("8-bit pages")
    width = num_kv_heads * head_dim
    _kv_scatter_kernel[(num_tokens,)](
        k,
        v,
        pages.k,
        pages.v,
        slots,
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
