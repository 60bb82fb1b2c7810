"""Launcher of kv_scatter's Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.kernels.kv_move_triton import Rows, move

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.kv_pages import KvPages


def kv_scatter(k: Tensor, v: Tensor, pages: KvPages, slots: Tensor) -> None:
    """See kernels.kv_scatter; a token's heads must lie together."""
    target = Rows("pages.", pages.k, pages.v, pages.k_scale, pages.v_scale)
    move(Rows("", k, v, None, None), target, slots, gather=False)
