"""Arena: the memory of a forward pass's intermediate results, used again by the next pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class Arena:
    """Hands out tensors from one block of CPU memory; `reset` takes all of them back.

    A pass that needs more than the block holds gets the rest from torch, and the next `reset`
    makes the block large enough. That moves the memory: what was recorded before is stale, which
    `generation` tells.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0  # may exceed the block

    def reset(self) -> None:
        """Begins a pass: nothing handed out before may be used any more."""
        if self._used_bytes > self._block.numel():
            # Half more than asked for, so that growing batches do not move it every time.
            self._block = torch.empty(self._used_bytes * 3 // 2, dtype=torch.uint8)
            self.generation += 1
        self._used_bytes = 0

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor on the CPU."""
        assert device.type == "cpu", "the arena is CPU memory"
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        self._used_bytes = -(-(start + num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._used_bytes > self._block.numel():
            return torch.empty(shape, dtype=dtype, device=device)
        return self._block[start : start + num_bytes].view(dtype).view(shape)
