"""join_rows: projections of the same input as one quantised weight, none of them changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.stored_matrix import nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One below the other; None where their groups do not nest.

    Parts may differ: four bits are stored as eight beside eight, and a group is split where
    another part has smaller ones. Neither changes a weight.
    """
    width = parts[0].in_features
    group_size = min(part.group_size for part in parts)
    if any(part.group_size % group_size and part.group_size < width for part in parts):
        return None
    bits = max(part.bits for part in parts)
    groups = torch.arange(0, width, group_size, device=parts[0].values.device)

    def numbers(part: QuantizedWeight, per_group: Tensor) -> Tensor:
        return per_group[:, groups // part.group_size]

    return QuantizedWeight(
        bits,
        width,
        group_size,
        torch.cat([p.values if p.bits == bits else nibbles(p.values) for p in parts]),
        torch.cat([numbers(p, p.scales) for p in parts]),
        torch.cat([numbers(p, p.offsets) for p in parts]),
    )
