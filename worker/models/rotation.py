"""Rotation: one RoPE setting's frequencies on a device, and the tables of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.kernels.rope import rotation_tables
from legato.worker.models.rope import inverse_frequencies

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from legato.worker.models.config import RopeConfig


class Rotation:
    """Layers with the same setting share its tables."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor

    def tables(self, positions: Tensor) -> Tensor:
        """Positions [T] to cos and sin [T, 2, head_dim / 2] fp32, for `kernels.rope`."""
        half = self._inverse_frequencies.shape[0]
        out = self._inverse_frequencies.new_empty(positions.shape[0], 2, half)
        return rotation_tables(positions, self._inverse_frequencies, out, scale=self._scale)
