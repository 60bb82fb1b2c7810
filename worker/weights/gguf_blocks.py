"""GGUF's blocks of 32 weights as a QuantizedWeight: the file's own numbers, nothing is rounded.

Q8_0: fp16 d, 32 int8: w = d * q. Q4_0: fp16 d, 16 bytes: w = d * (q - 8). Q4_1: fp16 d and m, 16
bytes: w = d * q + m. In the bytes the low halves are weights 0 to 15, the high ones 16 to 31.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.stored_matrix import pack_nibbles

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK = 32
KEPT_TYPES = ("Q4_0", "Q4_1", "Q8_0")


def concatenated(pieces: Iterable[QuantizedWeight]) -> QuantizedWeight:
    """Pieces of one matrix, at least one, one below the other."""
    parts = list(pieces)
    first = parts[0]
    return QuantizedWeight(
        first.bits,
        first.in_features,
        first.group_size,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.offsets for part in parts]),
    )


def read_blocks(raw: Tensor, kind: str) -> QuantizedWeight:
    """Rows of blocks, [N, bytes of a row] uint8, of a type in `KEPT_TYPES`.

    Raises:
        ValueError: a scale is not finite.
    """
    num_scales = 2 if kind == "Q4_1" else 1
    block_bytes = 2 * num_scales + (BLOCK if kind == "Q8_0" else BLOCK // 2)
    blocks = raw.view(raw.shape[0], -1, block_bytes)  # [N, G, bytes]
    numbers = blocks[..., : 2 * num_scales].contiguous().view(torch.float16).float()
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError("holds a scale that is NaN or infinity")
    scales, data = numbers[..., 0].contiguous(), blocks[..., 2 * num_scales :]
    width = blocks.shape[1] * BLOCK
    if kind == "Q8_0":
        # A signed byte plus 128; times fp16 that is exact in fp32.
        return QuantizedWeight(8, width, BLOCK, data.flatten(1) ^ 128, scales, -128 * scales)
    halves = torch.cat((data & 15, data >> 4), -1)
    offsets = numbers[..., 1].contiguous() if kind == "Q4_1" else -8 * scales
    return QuantizedWeight(4, width, BLOCK, pack_nibbles(halves.flatten(1)), scales, offsets)
