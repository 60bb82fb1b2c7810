"""The plainest torch spelling of every op: the oracle of the tests, on no product path."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm`, in fp64."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(
        x.dtype
    )


def apply_rope(heads: Tensor, positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Rotated copy of heads [T, num_heads, head_dim]: pair (i, i + half) by its angle."""
    half = heads.shape[-1] // 2
    rotated = torch.empty_like(heads)
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = torch.tensor(float(position)) * inverse_frequencies[i]
            a, b = heads[t, :, i].float(), heads[t, :, i + half].float()
            rotated[t, :, i] = (a * angle.cos() - b * angle.sin()).to(heads.dtype)
            rotated[t, :, i + half] = (b * angle.cos() + a * angle.sin()).to(heads.dtype)
    return rotated


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.silu_mul`, in fp64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: list[list[int]],
    query_starts: list[int],
    context_lens: list[int],
    block_size: int,
    scale: float,
) -> Tensor:
    """Decode and prefill attention, one query head of one token at a time, in fp64."""
    output = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for s, context_len in enumerate(context_lens):
        slots = [
            block_tables[s][position // block_size] * block_size + position % block_size
            for position in range(context_len)
        ]
        for t in range(query_starts[s], query_starts[s + 1]):
            visible = slots[: context_len - (query_starts[s + 1] - 1 - t)]
            for head in range(q.shape[1]):
                keys = k_cache[visible, head // group].double()
                values = v_cache[visible, head // group].double()
                weights = (keys @ q[t, head].double() * scale).softmax(0)
                output[t, head] = (weights @ values).to(q.dtype)
    return output
