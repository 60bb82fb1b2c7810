"""linear: x @ weight.T + bias, with weights of every form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from legato.kernels.layout import require_shape

if TYPE_CHECKING:
    from legato.kernels.weight import QuantizedWeight, Weight


def pack_weight(weight: Tensor | QuantizedWeight) -> Weight:
    """Brings a weight [out, in] into the form that `linear` reads fastest on its device."""
    return weight


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [T, in] and a weight [out, in] to [T, out].

    Args:
        x: rows may have any stride.
        weight: plain, quantised or from `pack_weight`.
        bias: [out], of x's dtype.
        out: [T, out] contiguous; made where it is None.
    """
    wide = weight if isinstance(weight, Tensor) else weight.dequantize()
    result = F.linear(x, wide.to(x.dtype), bias)
    if out is None:
        return result
    require_shape(out, tuple(result.shape), "out")
    return out.copy_(result)
