"""kv_quantize: rows of K or V to 8 bits with a scale a head, and back."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest magnitude of each 8-bit dtype: a row's largest element becomes it.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [..., head_dim] to the same shape in `dtype`, and scales [...] fp32.

    The scale is max|row| / largest; a row of zeros, or of numbers so small that 1 / scale would be
    infinite, has scale 0 and becomes zeros. int8 rounds to the nearest, ties to even.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    scaled = wide * inverse[..., None]
    if dtype == torch.int8:
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(dtype), scales


def dequantize_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """The inverse, in fp32."""
    return rows.float() * scales[..., None]


def convert_rows(
    rows: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """rows [..., head_dim], 8-bit ones with scales [...], as `dtype`; theirs stays bit for bit."""
    if rows.dtype == dtype:
        return rows, scales
    wide = rows.float() if scales is None else dequantize_rows(rows, scales)
    return quantize_rows(wide, dtype) if dtype in LARGEST else (wide.to(dtype), None)
