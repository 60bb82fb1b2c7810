"""Spread: the middle and the range of what several rounds measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Spread:
    """Of at least one value."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there is none."""
        if not values:
            raise ValueError("nothing was measured")
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], limits: Sequence[float]) -> Spread:
        """Of value over limit in each round: both were measured within moments."""
        return cls.of([value / limit for value, limit in zip(values, limits, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.lowest:.3g} to {self.highest:.3g})"
