"""Rotation: one RoPE setting's frequencies on a device, and the tables of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.rope import rotation_tables
from legato.worker.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.models.config import RopeConfig


class Rotation:
    """Layers with the same setting share its tables."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor

    def tables(self, batch: ForwardBatch) -> Tensor:
        """Cos and sin [T, 2, head_dim / 2] fp32 of the batch's positions, for `kernels.rope`."""
        frequencies = self._inverse_frequencies
        shape = (batch.positions.shape[0], 2, frequencies.shape[0])
        out = batch.empty(*shape, dtype=torch.float32, device=frequencies.device)
        return rotation_tables(batch.positions, frequencies, out, scale=self._scale)
