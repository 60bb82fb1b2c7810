"""Weights of a linear layer: quantised ones, and the packed form that the CPU kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from legato.kernels.layout import require_dtype, require_shape


@dataclass(frozen=True)
class QuantizedWeight:
    """w[n, k] = scales[n, g] * q[n, k] + offsets[n, g], where g = k // group_size.

    q is unsigned. 8 bits: one a byte. 4 bits: two a byte, the even k in the low half.
    """

    bits: int  # 4 or 8
    in_features: int  # K; a multiple of 8
    group_size: int  # K for one group a row; the last group may be shorter
    values: Tensor  # [N, K] or [N, K / 2] uint8
    scales: Tensor  # [N, ceil(K / group_size)] fp32
    offsets: Tensor  # alike; -scale * zero point

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")
        if self.in_features % 8:
            raise ValueError(f"in_features must be a multiple of 8, got {self.in_features}")
        rows, groups = self.values.shape[0], -(-self.in_features // self.group_size)
        for name, tensor, shape in (
            ("values", self.values, (rows, self.in_features * self.bits // 8)),
            ("scales", self.scales, (rows, groups)),
            ("offsets", self.offsets, (rows, groups)),
        ):
            require_shape(tensor, shape, name)
            require_dtype(tensor, torch.uint8 if name == "values" else torch.float32, name)

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

    def rows(self, indices: Tensor) -> QuantizedWeight:
        """The rows `indices` [R] int64 alone."""
        return QuantizedWeight(
            self.bits,
            self.in_features,
            self.group_size,
            self.values[indices],
            self.scales[indices],
            self.offsets[indices],
        )

    def dequantize(self) -> Tensor:
        """[N, K] fp32."""
        q = self.values
        if self.bits == 4:
            q = torch.stack((q & 15, q >> 4), -1).flatten(1)
        group = torch.arange(self.in_features, device=q.device) // self.group_size
        return self.scales[:, group] * q.float() + self.offsets[:, group]


PANEL = 32  # outputs a panel; LG_PANEL in kernels/csrc/gemm.h
_SCALE_CODES = {torch.float32: 0, torch.float16: 2}
_OFFSET_CODES = {torch.uint8: 1, torch.float16: 2, torch.float32: 3}
_FLOAT_KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of the C kernels; see `kernels/csrc/gemm.h` for the bytes."""

    kind: str  # "f32", "bf16", "f16", "q8", "q4"
    out_features: int
    in_features: int
    data: Tensor  # [panels, units a row, PANEL, bytes a unit] uint8
    group_size: int = 0  # 0 for float kinds
    scales: Tensor | None = None  # [panels, groups, PANEL] fp16 where that is exact, or fp32
    # Alike. uint8 zero points (offset = -scale * zero), or fp16 or fp32 offsets. None: all zero
    # points are `zero`.
    offsets: Tensor | None = None
    zero: int = 0
    # Two matrices of N / 2 rows, the first half of each panel from one, the second from the other.
    gated: bool = False

    def dequantize(self) -> Tensor:
        """[N, K] fp32; for tests, and where a weight has to be seen whole."""
        rows = self._rows(self.data)
        if self.scales is None:
            return rows.view(_FLOAT_KINDS[self.kind])[:, : self.in_features].float()
        scales = self._rows(self.scales.unsqueeze(-1)).float()
        if self.offsets is None:
            offsets = -scales * self.zero
        else:
            offsets = self._rows(self.offsets.unsqueeze(-1)).float()
            if self.offsets.dtype == torch.uint8:
                offsets *= -scales
        bits = 4 if self.kind == "q4" else 8
        wide = QuantizedWeight(bits, self.in_features, self.group_size, rows, scales, offsets)
        return wide.dequantize()

    @property
    def group_codes(self) -> tuple[int, int, int]:
        """Type of scales, type of offsets and zero point, as the C kernels want them."""
        assert self.scales is not None, "float kinds have no groups"
        offset_type = 0 if self.offsets is None else _OFFSET_CODES[self.offsets.dtype]
        return _SCALE_CODES[self.scales.dtype], offset_type, self.zero

    def _rows(self, panels: Tensor) -> Tensor:
        """[panels, units, PANEL, n] to [N, units * n]."""
        rows = panels.transpose(1, 2).flatten(2)
        if not self.gated:
            return rows.flatten(0, 1)[: self.out_features]
        matrices = rows.reshape(rows.shape[0], 2, PANEL // 2, -1).transpose(0, 1).flatten(1, 2)
        return matrices[:, : self.out_features // 2].flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        """What a pass over the weight reads."""
        tensors = (self.data, self.scales, self.offsets)
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)


Weight: TypeAlias = Tensor | QuantizedWeight | PackedWeight
