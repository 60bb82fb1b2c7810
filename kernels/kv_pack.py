"""kv_pack and kv_unpack: rows of one layer's pages to the canonical hand-off layout and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from legato.kernels.kv_pages import check_pages, plain

if TYPE_CHECKING:
    from legato.kernels.kv_pages import KvPages


def kv_pack(pages: KvPages, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gathers rows, contiguous and independent of blocks, in the pages' dtype.

    Args:
        pages: of one layer.
        slots: [n] int64.

    Returns:
        Rows [2 (K, V), n, num_kv_heads, head_dim], and for 8-bit pages their scales
        [2, n, num_kv_heads] fp32, else None.
    """
    if pages.k.is_cuda:
        from legato.kernels import kv_pack_triton

        data = pages.k.new_empty((2, slots.shape[0], *pages.k.shape[1:]))
        scales = None if pages.k_scale is None else pages.k_scale.new_empty(data.shape[:3])
        kv_pack_triton.kv_pack(pages, slots, data, scales)
        return data, scales
    check_pages(pages)
    # torch's gather is a copy at memory speed.
    return _gather(pages.k, pages.v, slots), (
        None
        if pages.k_scale is None or pages.v_scale is None
        else _gather(pages.k_scale, pages.v_scale, slots)
    )


def kv_unpack(data: Tensor, scales: Tensor | None, pages: KvPages, slots: Tensor) -> None:
    """The inverse: lands what `kv_pack` gathered at `slots` [n] int64.

    Raises:
        ValueError: shape or dtype differ from the pages'; nothing is written.
    """
    _check(data, "data", slots, pages.k)
    if (scales is None) != (pages.k_scale is None):
        raise ValueError(f"pages of {pages.dtype}: exactly 8-bit rows come with scales")
    if scales is not None and pages.k_scale is not None:
        _check(scales, "scales", slots, pages.k_scale)
    if pages.k.is_cuda:
        from legato.kernels import kv_pack_triton

        kv_pack_triton.kv_unpack(data, scales, pages, slots)
        return
    check_pages(pages)
    if scales is not None and pages.k_scale is not None and pages.v_scale is not None:
        pages.k_scale.index_copy_(0, slots, scales[0])
        pages.v_scale.index_copy_(0, slots, scales[1])
    data = plain(data)
    plain(pages.k).index_copy_(0, slots, data[0])
    plain(pages.v).index_copy_(0, slots, data[1])


def _gather(k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    data = k.new_empty((2, slots.shape[0], *k.shape[1:]))
    torch.index_select(k, 0, slots, out=data[0])
    torch.index_select(v, 0, slots, out=data[1])
    return data


def _check(data: Tensor, name: str, slots: Tensor, pages: Tensor) -> None:
    expected = (2, slots.shape[0], *pages.shape[1:])
    if tuple(data.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(data.shape)}")
    if data.dtype != pages.dtype:
        raise ValueError(f"{name} must be {pages.dtype} like the pages, got {data.dtype}")
