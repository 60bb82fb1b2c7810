"""KvPages: one layer's K and V rows by slot, in a float dtype or 8 bits with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.layout import require_contiguous, require_dtype, require_shape

QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
# As csrc/kv_rows.h counts them.
NATIVE_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}


def plain(rows: Tensor) -> Tensor:
    """8-bit rows as bytes: torch cannot write fp8 by index."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


@dataclass(frozen=True)
class KvPages:
    """Slot = block id * block size + offset in the block.

    With 8-bit rows each (slot, head) has a scale: the value is row * scale.
    """

    k: Tensor  # [num_slots, num_kv_heads, head_dim], contiguous
    v: Tensor  # alike
    k_scale: Tensor | None = None  # [num_slots, num_kv_heads] fp32; None for float dtypes
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        quantized = self.k.dtype in QUANTIZED_DTYPES
        if quantized != (self.k_scale is not None) or quantized != (self.v_scale is not None):
            raise ValueError(f"pages of {self.k.dtype} need scales: exactly 8-bit ones do")

    @property
    def num_kv_heads(self) -> int:
        """Heads of K, and of V."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.k.dtype


def check_pages(pages: KvPages) -> None:
    """Raises ValueError naming what in the pages a kernel would read or write wrongly."""
    require_shape(pages.v, tuple(pages.k.shape), "pages.v")
    require_dtype(pages.v, pages.dtype, "pages.v")
    require_contiguous(**{"pages.k": pages.k, "pages.v": pages.v})
    for name, scales in (("pages.k_scale", pages.k_scale), ("pages.v_scale", pages.v_scale)):
        if scales is not None:
            require_shape(scales, tuple(pages.k.shape[:2]), name)
            require_dtype(scales, torch.float32, name)
            require_contiguous(**{name: scales})
