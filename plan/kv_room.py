"""KvRoom: how many sequences a decode worker's KV memory holds, by their distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.plan.traffic import Traffic

# A full batch may need more than there is so often: then sequences are preempted and come back.
OVERFLOW_SHARE = 0.01
_QUANTILE = NormalDist().inv_cdf(1 - OVERFLOW_SHARE)


@dataclass(frozen=True)
class KvRoom:
    """Rows are tokens of KV. Sequences of a batch have lengths that do not depend on each other."""

    capacity_rows: int
    rows_mean: float  # of a sequence at a random moment, with its last block's empty rows
    rows_deviation: float

    @classmethod
    def of(cls, traffic: Traffic, capacity_rows: int, block_size: int) -> KvRoom:
        """Raises ValueError where the longest request does not fit."""
        if traffic.longest_rows + block_size > capacity_rows:
            raise ValueError(
                f"KV memory holds {capacity_rows:,} tokens, and the longest request needs "
                f"{traffic.longest_rows:,}: give more memory, 8-bit KV, or shorter requests"
            )
        mean, deviation = traffic.resident_rows()
        return cls(capacity_rows, mean + (block_size - 1) / 2, deviation)

    def rows_quantile(self, num_sequences: float) -> float:
        """What so many need at most, but for OVERFLOW_SHARE of the time."""
        spread = _QUANTILE * self.rows_deviation * math.sqrt(num_sequences)
        return num_sequences * self.rows_mean + spread

    @property
    def num_sequences(self) -> int:
        """The most that fit, but for OVERFLOW_SHARE of the time; at least one does."""
        if self.rows_mean <= 0:
            return self.capacity_rows
        # n * mean + q * deviation * sqrt(n) = capacity, solved for sqrt(n).
        half = _QUANTILE * self.rows_deviation / 2
        root = (math.sqrt(half**2 + self.rows_mean * self.capacity_rows) - half) / self.rows_mean
        return max(1, math.floor(root**2))
