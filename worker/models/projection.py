"""Projection: a linear layer's weight and bias, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import Weight
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class Projection:
    """x @ weight.T + bias."""

    weight: Weight  # [out, in]
    bias: Tensor | None  # [out]

    @classmethod
    def read(cls, reader: WeightReader, *names: str, transposed: bool = False) -> Projection:
        """Several names: projections of the same input as one, its outputs one after the other."""
        return cls(reader.matrix(*names, transposed=transposed), reader.bias(*names))

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[T, in] to `out` [T, out]."""
        return linear(x, self.weight, self.bias, out)
