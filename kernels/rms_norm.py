"""rms_norm: root-mean-square normalisation, alone or with a residual add before or after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous, require_contiguous_rows, require_shape


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, reduced in fp32.

    Args:
        x: [T, N], or [T, num_heads, N] for a norm of each head; any row stride.
        weight: [N].
        eps: added to the mean.
        out: of x's shape; may be x itself. Made where it is None.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require_shape(out, tuple(x.shape), "out")
    require_shape(weight, (x.shape[-1],), "weight")
    if x.is_cuda:
        from legato.kernels import rms_norm_triton

        return rms_norm_triton.rms_norm(x, weight, eps, out)
    if native.takes(x, weight, out):
        require_contiguous_rows(x=x, out=out)
        require_contiguous(weight=weight)
        heads = 1 if x.dim() == 2 else x.shape[1]
        sizes = (x.shape[0], x.shape[-1], x.stride(0), out.stride(0), heads)
        native.launch("lg_rms_norm", (x, weight, out), sizes, (eps,))
        return out
    return out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Adds x [T, N] to `residual` in place and returns the residual's `rms_norm`.

    `out` may be x itself.
    """
    out = torch.empty_like(x) if out is None else out
    require_shape(out, tuple(x.shape), "out")
    require_shape(residual, tuple(x.shape), "residual")
    require_shape(weight, (x.shape[1],), "weight")
    if x.is_cuda:
        from legato.kernels import rms_norm_triton

        return rms_norm_triton.add_rms_norm(x, residual, weight, eps, out)
    if native.takes(x, residual, weight, out):
        require_contiguous(x=x, residual=residual, weight=weight, out=out)
        native.launch("lg_add_rms_norm", (x, residual, weight, out), tuple(x.shape), (eps,))
        return out
    return out.copy_(F.rms_norm(residual.add_(x), (x.shape[-1],), weight, eps))


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Adds the `rms_norm` of x [T, N] to `residual`, in place (Gemma's norms behind a block)."""
    require_shape(residual, tuple(x.shape), "residual")
    require_shape(weight, (x.shape[1],), "weight")
    if x.is_cuda:
        from legato.kernels import rms_norm_triton

        rms_norm_triton.rms_norm_add(x, residual, weight, eps)
        return
    if native.takes(x, residual, weight):
        require_contiguous(x=x, residual=residual, weight=weight)
        native.launch("lg_rms_norm_add", (x, residual, weight), tuple(x.shape), (eps,))
        return
    residual.add_(F.rms_norm(x, (x.shape[-1],), weight, eps))
