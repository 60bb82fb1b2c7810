"""draw_weights: e^((logit - best) / temperature) as whole numbers, the same on every device.

Sums of whole numbers are exact in any order, so a sampled token depends neither on how a device
adds nor on how it computes e^x: C, Triton and torch all follow the few steps below, each of which
IEEE 754 or integer arithmetic defines to the last bit.

    z = trunc(min((best - logit) / temperature, 43) * log2(e) * 2^25), in fp32
    n, f = z >> 25, z & (2^25 - 1)
    weight = (2^31 * 2^(-f / 2^25)) << 9 >> n, the power by a polynomial in 31-bit fixed point

The best token's weight is 2^40; below 2^-40 of that (z over 40) a token has none. The polynomial is
within 6e-9 of the power and falls monotonically.
"""

from __future__ import annotations

import torch
from torch import Tensor

POINT = 40  # the best token weighs 2^POINT; 2^22 tokens fit into an int64
LARGEST_QUOTIENT = 43.0  # * log2(e) < 63; its weight is 0
FRACTION_BITS = 25
SCALE = 48408812.0  # log2(e) in fp32, times 2^25
# 2^-x on [0, 1], alternating in sign, times 2^31; the minimax fit that is exact at 0.
POWER = (1 << 31, 1488521986, 515877902, 119165493, 20571132, 2737501, 234126)


def draw_weights(logits: Tensor, best: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [R, V] fp32 without NaN, their maxima [R], temperatures [R] > 0 to [R, V] int64."""
    quotients = (best[:, None] - logits) / temperatures.float()[:, None]
    z = (quotients.clamp_(max=LARGEST_QUOTIENT) * SCALE).to(torch.int64)
    whole, fraction = z >> FRACTION_BITS, z & ((1 << FRACTION_BITS) - 1)
    power = torch.full_like(fraction, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power = coefficient - (power * fraction >> FRACTION_BITS)
    return power << (POINT - 31) >> whole
