"""gated: the activations of an MLP, silu(gate) * up, gelu(gate) * up, and gelu alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous_rows, require_shape


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 * N], gate first, to [T, N] (Llama, Qwen)."""
    return _activate("silu_mul", gate_up, _half(gate_up), out)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Alike with GELU in its tanh form (Gemma)."""
    return _activate("gelu_mul", gate_up, _half(gate_up), out)


def gelu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """GELU in its tanh form of x [T, N] (GPT-2); `out` may be x."""
    return _activate("gelu", x, x.shape[1], out)


def _half(gate_up: Tensor) -> int:
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even width, got {gate_up.shape[1]}")
    return gate_up.shape[1] // 2


def _activate(kind: str, x: Tensor, width: int, out: Tensor | None) -> Tensor:
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device) if out is None else out
    require_shape(out, (x.shape[0], width), "out")
    if x.is_cuda:
        from legato.kernels import gated_triton

        return gated_triton.activate(kind, x, out)
    if native.takes(x, out):
        require_contiguous_rows(x=x, out=out)
        sizes = (x.shape[0], width, x.stride(0), out.stride(0))
        native.launch(f"lg_{kind}", (x, out), sizes)
        return out
    if kind == "gelu":
        return out.copy_(F.gelu(x, approximate="tanh"))
    gate, up = x.chunk(2, -1)
    active = F.silu(gate) if kind == "silu_mul" else F.gelu(gate, approximate="tanh")
    return out.copy_(active.mul_(up))
