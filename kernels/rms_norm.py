"""rms_norm: root-mean-square normalisation, alone or with the residual add before it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, N] / sqrt(mean(x²) + eps) * weight [N], reduced in fp32, a row at a time."""
    if x.is_cuda:
        from legato.kernels import rms_norm_triton

        return rms_norm_triton.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [T, N] to `residual` in place and returns the residual's `rms_norm`."""
    if x.is_cuda:
        from legato.kernels import rms_norm_triton

        return rms_norm_triton.add_rms_norm(x, residual, weight, eps)
    return F.rms_norm(residual.add_(x), (x.shape[-1],), weight, eps)
