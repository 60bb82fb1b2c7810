"""Random quantised weights with every form of offsets."""

from __future__ import annotations

import torch

from legato.kernels.weight import QuantizedWeight

OFFSETS = ("symmetric", "zero points", "fp16", "fp32")


def random_quantized(
    size_out: int,
    size_in: int,
    bits: int,
    group_size: int,
    offsets: str = "symmetric",
    *,
    half_scales: bool = True,
    generator: torch.Generator | None = None,
) -> QuantizedWeight:
    """Values over the whole range; scales that fp16 holds exactly, or not."""
    groups, top = -(-size_in // group_size), 2**bits
    q = torch.randint(0, top, (size_out, size_in), dtype=torch.uint8, generator=generator)
    scales = torch.rand(size_out, groups, generator=generator) / top + 0.1 / top
    if half_scales:
        scales = scales.half().float()
    random = torch.randn(size_out, groups, generator=generator) / 4
    by_offsets = {
        "symmetric": -scales * (top // 2),
        "zero points": -scales * torch.randint(0, top, (size_out, groups), generator=generator),
        "fp16": random.half().float(),
        "fp32": random,
    }
    values = q if bits == 8 else q[:, 0::2] | q[:, 1::2] << 4
    return QuantizedWeight(bits, size_in, group_size, values, scales, by_offsets[offsets])


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, K] as the kernels see it: 8 bits with one fp32 scale a group. fp64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group]
        most = part.abs().amax(1, keepdim=True)
        # As products of fp64 are exact, this rounds once, like a fused multiply and add.
        q = (part.double() * (torch.tensor(127.0) / most).double()).round()
        result[:, first : first + group] = q * (most / torch.tensor(127.0)).double()
    return result
