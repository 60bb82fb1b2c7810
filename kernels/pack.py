"""pack: weights into the panels that the C kernels read; `kernels/csrc/gemm.h` has the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import huge_pages, native
from legato.kernels.weight import PANEL, PackedWeight

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PACK = {1: "lg_pack_bytes", 2: "lg_pack_halves", 4: "lg_pack_words"}


def pack_tensor(weight: Tensor) -> PackedWeight:
    """Packs a plain weight [N, K], each element as it is.

    Raises:
        ValueError: not two-dimensional, empty, or of another dtype than fp32, bf16 and fp16.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"a weight must be a matrix [out, in], got shape {tuple(weight.shape)}")
    if weight.dtype not in _KINDS:
        raise ValueError(f"a weight must be fp32, bf16 or fp16, got {weight.dtype}")
    kind = _KINDS[weight.dtype]
    data = _panels(weight, 2 if kind == "f16" else 4)
    return PackedWeight(kind, weight.shape[0], weight.shape[1], 0, data, None, None)


def _panels(matrix: Tensor, unit_bytes: int) -> Tensor:
    """[N, ...] to uint8 [ceil(N / PANEL), units a row, PANEL, unit_bytes]."""
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    row_bytes = matrix.shape[1] * matrix.itemsize
    panels, units = -(-matrix.shape[0] // PANEL), -(-row_bytes // unit_bytes)
    out = huge_pages.empty((panels, units, PANEL, unit_bytes), torch.uint8)
    sizes = (matrix.shape[0], row_bytes, matrix.stride(0) * matrix.itemsize)
    native.launch(_PACK[unit_bytes], (matrix, out), sizes)
    return out
