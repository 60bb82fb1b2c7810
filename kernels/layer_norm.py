"""layer_norm: normalisation to mean 0 and variance 1, alone or after a residual add (GPT-2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous, require_shape


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over rows [T, N], reduced in fp32."""
    return _layer_norm(x, None, weight, bias, eps, out)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Adds x [T, N] to `residual` in place and returns the residual's `layer_norm`."""
    require_shape(residual, tuple(x.shape), "residual")
    return _layer_norm(x, residual, weight, bias, eps, out)


def _layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    require_shape(out, tuple(x.shape), "out")
    require_shape(weight, (x.shape[1],), "weight")
    require_shape(bias, (x.shape[1],), "bias")
    if x.is_cuda:
        from legato.kernels import layer_norm_triton

        return layer_norm_triton.layer_norm(x, residual, weight, bias, eps, out)
    if native.takes(x, residual, weight, bias, out):
        require_contiguous(x=x, weight=weight, bias=bias, out=out)
        if residual is not None:
            require_contiguous(residual=residual)
        tensors = (x, residual, weight, bias, out)
        native.launch("lg_layer_norm", tensors, tuple(x.shape), (eps,))
        return out
    summed = x if residual is None else residual.add_(x)
    return out.copy_(F.layer_norm(summed, (x.shape[-1],), weight, bias, eps))
