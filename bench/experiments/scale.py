"""Scale: from values to places along an axis, and the values whose places get a label."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`low` is at place `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def of(cls, values: list[float], start: float, end: float, *, log: bool) -> Scale:
        """Holds all values, with some room; a linear one begins at 0 where nothing is below."""
        low, high = min(values), max(values)
        if log:
            assert low > 0, f"no place for {low} on a logarithmic axis"
            room = max((high / low) ** 0.06, 1.1)
            return cls(low / room, high * room, start, end, log)
        return cls(min(0.0, low), high * 1.08 if high > 0 else 1.0, start, end, log)

    def __call__(self, value: float) -> float:
        """Values outside are put at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Four to nine round values."""
        if not self.log:
            return self._even_ticks()
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [
                digit * 10.0**power
                for power in range(first, last + 1)
                for digit in digits
                if self.low <= digit * 10.0**power <= self.high
            ]
            if len(found) <= 7:
                break
        return found if len(found) >= 3 else self._even_ticks()

    def _even_ticks(self) -> list[float]:
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]


def tick_label(value: float) -> str:
    """1,024, 2.5, 0.004, 1.5M, 3G."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
