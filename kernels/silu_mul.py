"""silu_mul: the gated activation of Llama's MLP, silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * N], gate first, to [T, N]."""
    if gate_up.is_cuda:
        from legato.kernels import silu_mul_triton

        return silu_mul_triton.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
