"""convert: from a tensor as stored to the dtype the engine computes in, refusing NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


def convert(stored: Tensor, dtype: torch.dtype, *, file: str, name: str) -> Tensor:
    """A contiguous copy in `dtype`, which no later change of the file can reach.

    Raises:
        CheckpointError: the tensor holds NaN or infinity, or a number too large for `dtype`.
    """
    converted = stored.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if _all_finite(converted):
        return converted
    if _all_finite(stored):
        raise CheckpointError(
            f"{file}: tensor {name} holds {stored.abs().max().item():.4g}, too large for "
            f"{str(dtype).removeprefix('torch.')}; choose float32 or bfloat16"
        )
    raise CheckpointError(f"{file}: tensor {name} holds NaN or infinity")


def _all_finite(tensor: Tensor) -> bool:
    # A sum is several times quicker than isfinite().all(), and NaN and infinity always show in
    # it. It may itself overflow, so a bad sum is only a suspicion.
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
