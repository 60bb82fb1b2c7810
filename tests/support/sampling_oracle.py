"""choose, row by row in plain Python whole numbers: what every path has to return."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from legato.kernels.counter_rng import signed_seed, uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_FP32 = struct.Struct("f")
_LARGEST = 3.4028235e38
Settings = tuple[
    float, int, float, float, int, int
]  # temperature, top_k, top_p, min_p, seed, index


def tensors(settings: Sequence[Settings]) -> tuple[Tensor, Tensor]:
    """The reals and integers of `kernels.choose.Choices`."""
    reals = [(t, p, m) for t, _, p, m, _, _ in settings]
    integers = [(k, signed_seed(seed), index) for _, k, _, _, seed, index in settings]
    return torch.tensor(reals, dtype=torch.float64), torch.tensor(integers, dtype=torch.int64)


def chosen(logits: Tensor, settings: Settings) -> int:
    """The token of one row [V]."""
    temperature, top_k, top_p, min_p, seed, index = settings
    row = logits.tolist()
    if any(math.isnan(x) for x in row) or not math.isfinite(max(row)):
        return -1
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0:
        return ranked[0]
    best = max(row)
    weights = [weight(best, x, temperature) for x in row]
    if 0 < top_k < len(row):
        ranked = ranked[:top_k]
    if top_p < 1:
        mass = math.ceil(float(sum(weights[i] for i in ranked)) * top_p)
        kept, reached = [], 0
        for i in ranked:
            if reached >= mass:
                break
            kept.append(i)
            reached += weights[i]
        ranked = kept
    ranked = [i for i in ranked if weights[i] >= min_p * 2**40]
    total = sum(weights[i] for i in ranked)
    goal = min(total, math.ceil(float(total) * uniform(seed, index)))
    running = 0
    for i in sorted(ranked):
        running += weights[i]
        if running >= goal:
            return i
    raise AssertionError("the running sum ends at the total")


def fp32(x: float) -> float:
    """The nearest fp32, as a float; infinity beyond the largest."""
    return math.copysign(math.inf, x) if abs(x) > _LARGEST else _FP32.unpack(_FP32.pack(x))[0]


def weight(best: float, logit: float, temperature: float) -> int:
    """Of one token, 2^40 for the best one; see `kernels.draw_weights`."""
    # Python's own floats are fp64; one operation of fp32 is theirs, rounded once more.
    quotient = fp32(fp32(best - logit) / fp32(temperature))
    z = int(fp32(min(quotient, 43.0) * 48408812.0))
    power = 234126
    for coefficient in (2737501, 20571132, 119165493, 515877902, 1488521986, 2**31):
        power = coefficient - (power * (z % 2**25) >> 25)
    return power * 2**9 >> (z >> 25)
