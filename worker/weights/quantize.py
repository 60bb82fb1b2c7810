"""quantize: what the names of `--weights` stand for, and a float matrix brought into that form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.quantize_weight import quantize_int4, quantize_int8

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight


@dataclass(frozen=True)
class QuantizeMode:
    """8 bits, symmetric, one scale a row; or 4 bits with a scale for each group of a row."""

    bits: int
    group_size: int | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        if self.bits == 8:
            return "int8"
        return f"int4-g{self.group_size}{'-sym' if self.symmetric else ''}"


INT8 = QuantizeMode(8)
MODES = {
    "int8": INT8,
    "int4": QuantizeMode(4, 64, symmetric=False),
    "int4-g64": QuantizeMode(4, 64, symmetric=False),
    "int4-g128": QuantizeMode(4, 128, symmetric=False),
    "int4-g64-sym": QuantizeMode(4, 64, symmetric=True),
    "int4-g128-sym": QuantizeMode(4, 128, symmetric=True),
}


def quantize(weight: Tensor, mode: QuantizeMode) -> QuantizedWeight:
    """A float weight [N, K] in the mode's form, on the device where it lies.

    Raises:
        ValueError: K is not a multiple of 8, or the weight is not finite.
    """
    if mode.bits == 8:
        return quantize_int8(weight)
    assert mode.group_size is not None, "4 bits come in groups"
    return quantize_int4(weight, mode.group_size, symmetric=mode.symmetric)
