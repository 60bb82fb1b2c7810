"""CtLayout: how the compressed-tensors library packs a matrix, integers only.

For each layer, in format "pack-quantized": `weight_packed` [N, K / f] int32 with f = 32 / bits
values in each, the lowest bits first, unsigned: the signed value plus 2^(bits - 1); in
"int-quantized": `weight` [N, K] int8. Then `weight_scale` [N, G] (group), [N, 1] (channel) or [1]
(tensor), and where it is asymmetric `weight_zero_point`, in pack-quantized packed along N.
w = scale * (q - zero), q and zero signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.stored_matrix import (
    SCALE_DTYPES,
    Codes,
    check_width,
    nibbles,
    packed_words,
)

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.weights.stored_matrix import Parts


@dataclass(frozen=True)
class CtLayout:
    """See `Layout`."""

    packed: bool
    bits: int
    strategy: str  # group, channel, tensor
    group_size: int | None
    symmetric: bool
    act_order: bool = False  # groups are of any inputs: weight_g_idx says which

    def shape(self, parts: Parts) -> tuple[int, int]:
        """See `Layout`."""
        rows, width = self._checked_values(parts)
        check_width(parts.stem, str(parts.tensors["weight_scale"].file), width)
        groups = self._num_groups(width)
        if self.strategy == "tensor":
            scale = parts.tensors["weight_scale"]
            shape: tuple[int, ...] = () if scale.shape == () else (1,)
        else:
            shape = (rows, groups)
        parts.require("weight_scale", SCALE_DTYPES, shape)
        if "weight_zero_point" in parts or not self.symmetric:
            zero = parts.tensors.get("weight_zero_point")
            if zero is not None and zero.dtype == "I32" and self.packed:
                shape = (-(-rows * self.bits // 32), groups)
            parts.require("weight_zero_point", ("I8", "I32") if self.packed else ("I8",), shape)
        if "weight_g_idx" in parts or (self.act_order and groups > 1):
            parts.require("weight_g_idx", ("I32", "I64"), (width,))
        return rows, width

    def read(self, parts: Parts) -> Codes:
        """See `Layout`."""
        rows, width = self.shape(parts)
        groups, middle = self._num_groups(width), 2 ** (self.bits - 1)
        if self.packed:
            declared = parts.read("weight_shape").tolist()
            if declared != [rows, width]:
                raise parts.error("weight_shape", f"holds {declared}, must hold {[rows, width]}")
            values = packed_words(parts.read("weight_packed"))
        else:
            values = parts.read("weight").view(torch.uint8) ^ 128  # adds 128 to a signed byte
        scales = parts.scales("weight_scale").reshape(-1, groups).expand(rows, groups)
        zeros = self._zeros(parts, rows, groups)
        group_size = self.group_size or width
        weight = QuantizedWeight(
            self.bits,
            width,
            group_size,
            values,
            scales.contiguous(),
            -scales * (zeros + float(middle)),
        )
        order = None
        if "weight_g_idx" in parts:
            order = parts.groups("weight_g_idx", width, group_size, groups)
        return Codes(weight, order)

    def _num_groups(self, width: int) -> int:
        return -(-width // (self.group_size or width))

    def _checked_values(self, parts: Parts) -> tuple[int, int]:
        if not self.packed:
            rows, width = parts.stored("weight", ("I8",)).shape
        else:
            rows, words = parts.stored("weight_packed", ("I32",)).shape
            width = words * (32 // self.bits)
            parts.require("weight_shape", ("I64", "I32"), (2,))
        if "weight_scale" not in parts:
            raise parts.error("weight_scale", "is missing from the checkpoint")
        return rows, width

    def _zeros(self, parts: Parts, rows: int, groups: int) -> Tensor:
        """Signed, [N, G] or what expands to it, fp32."""
        if "weight_zero_point" not in parts:
            return torch.zeros(1, 1)
        stored, middle = parts.read("weight_zero_point"), 2 ** (self.bits - 1)
        if stored.dtype == torch.int32:
            unsigned = packed_words(stored.t())
            if self.bits == 4:
                unsigned = nibbles(unsigned)
            return unsigned.t()[:rows].float().sub(middle)
        stored = stored.float()
        if bool(((stored < -middle) | (stored >= middle)).any()):
            raise parts.error(
                "weight_zero_point", f"holds a number outside [{-middle}, {middle - 1}]"
            )
        return stored.reshape(-1, groups)
