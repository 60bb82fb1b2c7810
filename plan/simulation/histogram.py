"""Histogram: many positive values in little memory, to within a quarter of a percent."""

from __future__ import annotations

import math

_STEP = math.log(1.005)


class Histogram:
    """Each bin is 0.5 % wider than the one before; its middle stands for its values."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """`count` values of `value`, above 0."""
        place = math.floor(math.log(value) / _STEP) if value > 1e-9 else -4155
        self._counts[place] = self._counts.get(place, 0) + count
        self.count += count
        self._sum += value * count

    def merge(self, other: Histogram) -> None:
        """Takes in what the other one holds."""
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + count
        self.count += other.count
        self._sum += other._sum

    @property
    def mean(self) -> float:
        """Exact; 0 where there is none."""
        return self._sum / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """`percent` of the values are no greater; 0 where there is none."""
        wanted, reached = max(1, math.ceil(percent / 100 * self.count)), 0
        for place in sorted(self._counts):
            reached += self._counts[place]
            if reached >= wanted:
                return math.exp((place + 0.5) * _STEP)
        return 0.0
