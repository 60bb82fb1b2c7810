"""kv_scatter: writes new rows of K and V to their slots in one layer's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels import native
from legato.kernels.kv_pages import NATIVE_DTYPES, check_pages, plain
from legato.kernels.kv_quantize import quantize_rows
from legato.kernels.layout import (
    require_contiguous,
    require_contiguous_rows,
    require_dtype,
    require_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.kv_pages import KvPages


def kv_scatter(k: Tensor, v: Tensor, pages: KvPages, slots: Tensor) -> None:
    """pages.k[slots] = k and pages.v[slots] = v, converted to the pages' dtype.

    8-bit pages get a scale a row and head: see `kernels.kv_quantize`.

    Args:
        k, v: [T, num_kv_heads, head_dim], any row stride, a row's heads contiguous.
        pages: of the layer.
        slots: [T] int64, all different.
    """
    if k.is_cuda:
        from legato.kernels import kv_scatter_triton

        kv_scatter_triton.kv_scatter(k, v, pages, slots)
        return
    if native.takes(k, v):
        _launch_native(k, v, pages, slots)
        return
    for new, rows, scales in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
        if scales is None:
            rows.index_copy_(0, slots, new.to(rows.dtype))
        else:
            quantized, new_scales = quantize_rows(new, rows.dtype)
            plain(rows).index_copy_(0, slots, plain(quantized))
            scales.index_copy_(0, slots, new_scales)


def _launch_native(k: Tensor, v: Tensor, pages: KvPages, slots: Tensor) -> None:
    num_tokens, (heads, head_dim) = slots.shape[0], pages.k.shape[1:]
    require_shape(k, (num_tokens, heads, head_dim), "k")
    require_shape(v, (num_tokens, heads, head_dim), "v")
    require_contiguous_rows(k=k, v=v)
    require_dtype(slots, torch.int64, "slots")
    require_contiguous(slots=slots)
    check_pages(pages)
    native.launch(
        "lg_kv_scatter",
        (k, v, pages.k, pages.v, pages.k_scale, pages.v_scale, slots),
        (num_tokens, heads, head_dim, NATIVE_DTYPES[pages.dtype], k.stride(0), v.stride(0)),
    )
