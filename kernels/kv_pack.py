"""kv_pack and kv_unpack: rows of one layer's pages to the canonical hand-off layout and back.

For devices, and for CPUs without the C kernels; with them `kernels.kv_rows` moves all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.kv_pages import QUANTIZED_DTYPES, check_pages, plain
from legato.kernels.kv_quantize import convert_rows
from legato.kernels.layout import require_dtype, require_shape

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.kv_pages import KvPages


def kv_pack(pages: KvPages, slots: Tensor, data: Tensor, scales: Tensor | None) -> None:
    """Gathers rows, independent of blocks, into data's dtype; in the pages' own bit for bit.

    Args:
        pages: of one layer.
        slots: [n] int64.
        data: [2 (K, V), n, num_kv_heads, head_dim], contiguous.
        scales: [2, n, num_kv_heads] fp32 for 8-bit data, else None.
    """
    if pages.k.is_cuda:
        from legato.kernels import kv_pack_triton

        kv_pack_triton.kv_pack(pages, slots, data, scales)
        return
    _check(data, scales, pages, slots)
    for i, (rows, row_scales) in enumerate(((pages.k, pages.k_scale), (pages.v, pages.v_scale))):
        chosen = plain(rows).index_select(0, slots).view(rows.dtype)
        chosen_scales = None if row_scales is None else row_scales.index_select(0, slots)
        converted, new_scales = convert_rows(chosen, chosen_scales, data.dtype)
        data[i].copy_(converted)
        if scales is not None and new_scales is not None:
            scales[i].copy_(new_scales)


def kv_unpack(data: Tensor, scales: Tensor | None, pages: KvPages, slots: Tensor) -> None:
    """The inverse: lands `data` at `slots` [n] int64, all different, in the pages' dtype.

    Raises:
        ValueError: a shape does not fit the pages' or the dtype; nothing is written.
    """
    if pages.k.is_cuda:
        from legato.kernels import kv_pack_triton

        kv_pack_triton.kv_unpack(data, scales, pages, slots)
        return
    _check(data, scales, pages, slots)
    for i, (rows, row_scales) in enumerate(((pages.k, pages.k_scale), (pages.v, pages.v_scale))):
        converted, new_scales = convert_rows(
            data[i], None if scales is None else scales[i], pages.dtype
        )
        plain(rows).index_copy_(0, slots, plain(converted))
        if row_scales is not None and new_scales is not None:
            row_scales.index_copy_(0, slots, new_scales)


def _check(data: Tensor, scales: Tensor | None, pages: KvPages, slots: Tensor) -> None:
    check_pages(pages)
    require_shape(data, (2, slots.shape[0], *pages.k.shape[1:]), "data")
    if (scales is not None) != (data.dtype in QUANTIZED_DTYPES):
        raise ValueError(f"data of {data.dtype}: exactly 8-bit rows come with scales")
    if scales is not None:
        require_shape(scales, tuple(data.shape[:3]), "scales")
        require_dtype(scales, torch.float32, "scales")
