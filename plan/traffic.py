"""Traffic: how many requests come in a second, and how long prompts and answers are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from legato.plan.lengths import Lengths
    from legato.plan.trace import TraceLine

# Of each distribution: the highest stands for the requests above 99.5 %.
NUM_QUANTILES = 100
MAX_RATE_PER_S = 1e6


@dataclass(frozen=True, eq=False)
class Traffic:
    """Pairs of lengths that are equally likely; arrivals are a Poisson process."""

    rate_per_s: float
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefix_share: float = 0.0  # of a prompt's tokens, those that prefill workers have cached

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise ValueError(
                f"the rate must be in (0, {MAX_RATE_PER_S:,.0f}] requests/s, got {self.rate_per_s}"
            )
        if not 0 <= self.prefix_share < 1:
            raise ValueError(f"the prefix share must be in [0, 1), got {self.prefix_share}")
        assert len(self.prompt_tokens) == len(self.output_tokens) > 0

    @classmethod
    def of(
        cls, rate_per_s: float, inputs: Lengths, outputs: Lengths, prefix_share: float = 0.0
    ) -> Traffic:
        """Lengths that do not depend on each other."""
        prompts, answers = np.meshgrid(_quantiles(inputs), _quantiles(outputs), indexing="ij")
        return cls(rate_per_s, prompts.ravel(), answers.ravel(), prefix_share)

    @classmethod
    def of_trace(
        cls,
        lines: Sequence[TraceLine],
        rate_per_s: float | None = None,
        prefix_share: float = 0.0,
    ) -> Traffic:
        """The trace's pairs, at its own mean rate where none is given.

        Raises:
            ValueError: none is given, and the trace has no times, or one request.
        """
        if rate_per_s is None:
            first_s, last_s = lines[0].at_s, lines[-1].at_s
            if first_s is None or last_s is None or last_s <= first_s:
                raise ValueError("the trace tells no rate: it has no at_s; give --rate")
            rate_per_s = (len(lines) - 1) / (last_s - first_s)
        prompts = np.array([line.input_tokens for line in lines], np.int64)
        answers = np.array([line.output_tokens for line in lines], np.int64)
        return cls(rate_per_s, prompts, answers, prefix_share)

    @property
    def decoded_tokens(self) -> NDArray[np.int64]:
        """Of each answer, those that decode makes: all but the first."""
        return self.output_tokens - 1

    @property
    def decoded_per_s(self) -> float:
        """Tokens that decode has to make in a second."""
        return float(self.rate_per_s * self.decoded_tokens.mean())

    @property
    def longest_rows(self) -> int:
        """Rows of KV of the longest request at its end: the last token has none."""
        return int((self.prompt_tokens + self.output_tokens - 1).max())

    def resident_rows(self) -> tuple[float, float]:
        """Mean and standard deviation of the rows of KV that a sequence holds at a random moment.

        Long answers are found more often, as often as they have steps: before step i of n - 1 a
        sequence holds the prompt and i - 1 tokens, and writes one more.
        """
        steps = self.decoded_tokens.astype(np.float64)
        total = steps.sum()
        if total == 0:
            return 0.0, 0.0
        prompt = self.prompt_tokens.astype(np.float64)
        of_steps = steps * (steps + 1) / 2
        of_squares = steps * (steps + 1) * (2 * steps + 1) / 6
        mean = (steps * prompt + of_steps).sum() / total
        square = (steps * prompt**2 + 2 * prompt * of_steps + of_squares).sum() / total
        return float(mean), math.sqrt(max(0.0, float(square - mean**2)))


def _quantiles(lengths: Lengths) -> NDArray[np.int64]:
    if lengths.least == lengths.most:
        return np.array([lengths.least], np.int64)
    shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.array([lengths.quantile(float(share)) for share in shares], np.int64)
