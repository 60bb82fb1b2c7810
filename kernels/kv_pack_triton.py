"""Launchers of kv_pack's and kv_unpack's Triton kernel: rows that change their dtype on the way.

data is [2 (K, V), n, num_kv_heads, head_dim], contiguous; scales [2, n, num_kv_heads] fp32 for
8-bit data, else None. 8-bit rows of one dtype travel as they are, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.kernels.kv_move_triton import Rows, move
from legato.kernels.layout import require_shape

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.kv_pages import KvPages


def kv_pack(pages: KvPages, slots: Tensor, data: Tensor, scales: Tensor | None) -> None:
    """The rows of `slots` [n] to `data` and `scales`, converted to data's dtype."""
    move(_pages(pages), _data(data, scales, slots), slots, gather=True)


def kv_unpack(data: Tensor, scales: Tensor | None, pages: KvPages, slots: Tensor) -> None:
    """`data` to the rows of `slots` [n], all different, converted to the pages' dtype."""
    move(_data(data, scales, slots), _pages(pages), slots, gather=False)


def _pages(pages: KvPages) -> Rows:
    return Rows("pages.", pages.k, pages.v, pages.k_scale, pages.v_scale)


def _data(data: Tensor, scales: Tensor | None, slots: Tensor) -> Rows:
    require_shape(data, (2, slots.shape[0], *data.shape[2:]), "data")
    if scales is None:
        return Rows("data ", data[0], data[1], None, None)
    require_shape(scales, (2, slots.shape[0], *data.shape[2:3]), "scales")
    return Rows("data ", data[0], data[1], scales[0], scales[1])
