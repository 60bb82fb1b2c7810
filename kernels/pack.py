"""pack: weights into the panels that the C kernels read; `kernels/csrc/gemm.h` has the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import huge_pages, native
from legato.kernels.weight import PANEL, PackedWeight, QuantizedWeight

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PACK = {1: "lg_pack_bytes", 2: "lg_pack_halves", 4: "lg_pack_words"}


def pack_tensor(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Packs a plain weight [N, K], each element as it is.

    Raises:
        ValueError: not two-dimensional, empty, or of another dtype than fp32, bf16 and fp16; or
            gated with an odd N.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"a weight must be a matrix [out, in], got shape {tuple(weight.shape)}")
    if weight.dtype not in _KINDS:
        raise ValueError(f"a weight must be fp32, bf16 or fp16, got {weight.dtype}")
    kind = _KINDS[weight.dtype]
    data = _panels(weight, 2 if kind == "f16" else 4, gated=gated)
    return PackedWeight(kind, weight.shape[0], weight.shape[1], data, gated=gated)


def pack_quantized(weight: QuantizedWeight, *, gated: bool = False) -> PackedWeight:
    """Packs a quantised weight. Scales become fp16 where that loses nothing.

    Raises:
        ValueError: the weight is empty, or its group size is no multiple of 8; or gated with an
            odd N.
    """
    if weight.values.numel() == 0:
        raise ValueError(f"a weight must not be empty, got {tuple(weight.values.shape)}")
    if weight.group_size % 8 and weight.group_size < weight.in_features:
        raise ValueError(f"group_size must be a multiple of 8, got {weight.group_size}")
    offsets, zero = _compact_offsets(weight.scales, weight.offsets)
    return PackedWeight(
        f"q{weight.bits}",
        weight.out_features,
        weight.in_features,
        _panels(weight.values, 4, gated=gated),
        min(weight.group_size, weight.in_features),
        _group_panels(_compact(weight.scales), gated=gated),
        None if offsets is None else _group_panels(offsets, gated=gated),
        zero,
        gated=gated,
    )


def _compact(values: Tensor) -> Tensor:
    """fp16 where that is exact."""
    half = values.half()
    return half if torch.equal(half.float(), values) else values


def _compact_offsets(scales: Tensor, offsets: Tensor) -> tuple[Tensor | None, int]:
    """Offsets in the smallest form that loses nothing: one zero point, uint8 ones, or floats."""
    zeros = torch.where(scales == 0, 0.0, -offsets / scales).round()
    whole = torch.equal(-(scales * zeros), offsets) and bool(((zeros >= 0) & (zeros < 256)).all())
    if not whole:
        return _compact(offsets), 0
    used = zeros[scales != 0]
    if used.numel() == 0 or bool((used == used[0]).all()):
        return None, 0 if used.numel() == 0 else int(used[0])
    return zeros.to(torch.uint8), 0


def _group_panels(values: Tensor, *, gated: bool) -> Tensor:
    """[N, groups] to [panels, groups, PANEL]."""
    return _panels(values, values.itemsize, gated=gated).view(values.dtype).squeeze(-1)


def _panels(matrix: Tensor, unit_bytes: int, *, gated: bool) -> Tensor:
    """[N, ...] to uint8 [ceil(N / PANEL), units a row, PANEL, unit_bytes]."""
    if gated and matrix.shape[0] % 2:
        raise ValueError(f"a gated weight must have an even number of rows, got {matrix.shape[0]}")
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    row_bytes = matrix.shape[1] * matrix.itemsize
    panels, units = -(-matrix.shape[0] // PANEL), -(-row_bytes // unit_bytes)
    out = huge_pages.empty((panels, units, PANEL, unit_bytes), torch.uint8)
    sizes = (matrix.shape[0], row_bytes, matrix.stride(0) * matrix.itemsize, int(gated))
    native.launch(_PACK[unit_bytes], (matrix, out), sizes)
    return out
