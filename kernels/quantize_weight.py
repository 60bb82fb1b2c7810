"""quantize_weight: a float weight to 8 bits a row, or 4 bits a group with least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.weight import QuantizedWeight

MAX_GROUP_SIZE = 128  # of 4 bits
_TINY = 1e-30  # a smaller range counts as constant: 1 / scale must stay finite
# First guesses, each improved REFINEMENTS times: shares of the group's range that the levels 0 to
# 15 span; and the levels, negated, of a symmetric group's largest weight.
_RANGE_SHARES = (1.0, 0.9, 0.8, 0.7)
_EXTREME_LEVELS = (8.0, 7.0, 9.0, 10.0)
_REFINEMENTS = 2
_ROWS_AT_ONCE = 1 << 22  # elements; bounds the copies that the torch path makes


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """[N, K] to 8 bits: w = scale * (q - 128), one scale a row, the largest weight at ±127.

    Raises:
        ValueError: K is not a multiple of 8, or the weight is not finite.
    """
    weight = _checked(weight)
    rows, width = weight.shape
    values = torch.empty(rows, width, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, 1, device=weight.device)
    offsets = torch.empty_like(scales)
    if native.takes(weight):
        native.launch("lg_quantize_8bit", (weight, values, scales, offsets), (rows, width))
    else:
        for start, stop in _pieces(rows, width):
            piece = weight[start:stop]
            largest = piece.abs().amax(1, keepdim=True)
            scale = torch.where(largest > _TINY, largest / 127, 0.0)
            values[start:stop] = torch.round(piece * _inverse(scale)) + 128
            scales[start:stop] = scale
        torch.mul(scales, -128, out=offsets)
    return QuantizedWeight(8, width, width, values, _finite(scales), offsets)


def quantize_int4(weight: Tensor, group_size: int, *, symmetric: bool) -> QuantizedWeight:
    """[N, K] to 4 bits: w = scale * q + offset, a scale and an offset for each group of a row.

    Several clipped ranges are tried. For the levels that a range gives, scale and offset come from
    a least-squares fit; twice, and the best is kept. On SmolLM2 that leaves 0.76 of the squared
    error that the plain range leaves. Scales and offsets are fp16 numbers wherever that is as good.

    Args:
        weight: any float dtype.
        group_size: a multiple of 8; the last group of a row may be shorter.
        symmetric: offset = -8 * scale; the scale may be negative.

    Raises:
        ValueError: K or group_size is not served, or the weight is not finite.
    """
    if group_size % 8 or not 8 <= group_size <= MAX_GROUP_SIZE:
        raise ValueError(
            f"group_size must be a multiple of 8 of at most {MAX_GROUP_SIZE}, got {group_size}"
        )
    weight = _checked(weight)
    rows, width = weight.shape
    groups = -(-width // group_size)
    values = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, groups, device=weight.device)
    offsets = torch.empty_like(scales)
    if native.takes(weight):
        tensors = (weight, values, scales, offsets)
        native.launch("lg_quantize_4bit", tensors, (rows, width, group_size, int(symmetric)))
    else:
        whole = width // group_size * group_size
        for start, stop in _pieces(rows, width):
            for first, last, size in ((0, whole, group_size), (whole, width, width - whole)):
                if first == last:
                    continue
                x = weight[start:stop, first:last].reshape(stop - start, -1, size)
                scale, offset = (_fit_symmetric if symmetric else _fit_affine)(x)
                scale = _to_half(scale, torch.zeros_like(scale))
                offset = -8 * scale if symmetric else _to_half(offset, scale.abs() * 2**-8)
                q = _levels(x, scale, offset).flatten(1).to(torch.uint8)
                values[start:stop, first // 2 : last // 2] = q[:, ::2] | q[:, 1::2] << 4
                at = slice(first // group_size, -(-last // group_size))
                scales[start:stop, at], offsets[start:stop, at] = scale[..., 0], offset[..., 0]
    return QuantizedWeight(4, width, group_size, values, _finite(scales), offsets)


def _checked(weight: Tensor) -> Tensor:
    if weight.dim() != 2 or weight.shape[1] % 8 or 0 in weight.shape:
        raise ValueError(
            f"a weight to quantise must be [N, K] with K a multiple of 8, got {list(weight.shape)}"
        )
    # Not only the scales: a NaN hides from comparisons.
    if not bool(torch.isfinite(weight.sum(dtype=torch.float32))) and not bool(
        torch.isfinite(weight).all()
    ):
        raise ValueError("a weight to quantise holds NaN or infinity")
    return weight.float().contiguous()


def _finite(scales: Tensor) -> Tensor:
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a weight to quantise holds numbers too large for fp32 sums")
    return scales


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    step = max(1, _ROWS_AT_ONCE // width)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _to_half(x: Tensor, allowed: Tensor) -> Tensor:
    """To fp16, which takes half the memory, where that moves x by no more than `allowed`."""
    half = x.half().float()
    return torch.where((half - x).abs() <= torch.maximum(allowed, x.abs() * 2**-11), half, x)


def _levels(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return torch.round(((x - offset) * _inverse(scale)).clamp(0, 15))


def _fit_affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, G, size] to scale and offset [R, G, 1]: for given levels they are a line's fit."""
    low, high, mean = (f(x, -1, keepdim=True) for f in (torch.amin, torch.amax, torch.mean))
    middle, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
    centred, size = x - mean, x.shape[-1]
    best = torch.full_like(mean, -1)
    best_scale, best_offset = torch.zeros_like(mean), middle
    for share in _RANGE_SHARES:
        scale, offset = half * share * (2 / 15), middle - half * share
        usable = half > _TINY
        gain = torch.full_like(mean, -1)  # how much of the group's variance the line explains
        for _ in range(_REFINEMENTS):
            q = _levels(x, scale, offset)
            q_mean = q.mean(-1, keepdim=True)
            variance = (q * q).sum(-1, keepdim=True) - size * q_mean * q_mean
            covariance = (q * centred).sum(-1, keepdim=True)
            fitted = covariance / variance
            usable = usable & (variance > 0.5) & (fitted > _TINY)
            scale = torch.where(usable, fitted, scale)
            offset = torch.where(usable, mean - fitted * q_mean, offset)
            gain = torch.where(usable, fitted * covariance, gain)
        better = gain > best
        best = torch.where(better, gain, best)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    return best_scale, best_offset


def _fit_symmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, G, size] to scale and offset [R, G, 1]; the largest weight can take level -8."""
    low, high = (f(x, -1, keepdim=True).values for f in (torch.min, torch.max))
    extreme = torch.where(high > -low, high, low)
    best = torch.full_like(extreme, -1)
    best_scale = torch.zeros_like(extreme)
    for level in _EXTREME_LEVELS:
        scale = extreme / -level
        gain = torch.full_like(extreme, -1)
        for _ in range(_REFINEMENTS):
            q = _levels(x, scale, -8 * scale) - 8
            product = (q * x).sum(-1, keepdim=True)
            scale = product / (q * q).sum(-1, keepdim=True)
            gain = scale * product
        better = (gain > best) & (extreme.abs() > _TINY)
        best = torch.where(better, gain, best)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale, -8 * best_scale
