"""The plainest torch spelling of every op: the oracle of the tests, on no product path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages


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


def gated_linear(x: Tensor, weight: Tensor, activation: str, bias: Tensor | None) -> Tensor:
    """As `kernels.gated_linear` with a plain weight, in and to fp64."""
    gate_up = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    gate, up = gate_up.chunk(2, -1)
    y = gate if activation == "silu" else (8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(y) * up


def paged_attention(
    q: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """Decode and prefill attention, one query head of one token at a time, in fp64.

    Arguments as `kernels.paged_prefill_attention`'s; returns [T, num_heads, head_dim] fp64.
    """
    output = torch.zeros(q.shape, dtype=torch.float64)
    group, size = q.shape[1] // pages.num_kv_heads, plan.block_size
    starts = plan.query_starts.tolist()
    for s, context_len in enumerate(plan.context_lens.tolist()):
        blocks = plan.block_table[s].tolist()
        slots = [blocks[p // size] * size + p % size for p in range(context_len)]
        keys, values = pages.k[slots].double(), pages.v[slots].double()
        if pages.k_scale is not None and pages.v_scale is not None:
            keys *= pages.k_scale[slots].double()[..., None]
            values *= pages.v_scale[slots].double()[..., None]
        for t in range(starts[s], starts[s + 1]):
            end = context_len - (starts[s + 1] - 1 - t)
            first = 0 if window is None else max(0, end - window)
            for head in range(q.shape[1]):
                k, v = (rows[first:end, head // group] for rows in (keys, values))
                output[t, head] = (k @ q[t, head].double() * scale).softmax(0) @ v
    return output
