"""Arrivals: when simulated requests come, and how long prompts and answers are; all from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from legato.plan.traffic import Traffic


@dataclass(frozen=True)
class Arrival:
    """One request. Its client asks for exactly `output_tokens`."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int


def draw_arrivals(traffic: Traffic, count: int, seed: int) -> list[Arrival]:
    """A Poisson process; each takes any of the traffic's pairs of lengths."""
    generator = np.random.Generator(np.random.PCG64(seed))
    times = np.cumsum(generator.exponential(1 / traffic.rate_per_s, count))
    picked = generator.integers(len(traffic.prompt_tokens), size=count)
    return [
        Arrival(number, at_s, prompt, output)
        for number, (at_s, prompt, output) in enumerate(
            zip(
                times.tolist(),
                traffic.prompt_tokens[picked].tolist(),
                traffic.output_tokens[picked].tolist(),
                strict=True,
            )
        )
    ]
