"""Measures: what simulated clients feel, over the time that is measured and over parts of it."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.plan.simulation.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_BATCHES = 10
# Student's t for 95 % and nine degrees of freedom.
_T_95 = 2.262


@dataclass(frozen=True)
class Estimate:
    """A figure, and half the width of its 95 % interval by batch means: the figure of each of ten
    parts of the time, taken as independent.
    """

    value: float
    half_width: float

    def as_json(self) -> dict[str, float | None]:
        """Seconds, to the microsecond; None where there is no end of it."""
        return {
            name: round(value, 6) if math.isfinite(value) else None
            for name, value in (("value", self.value), ("half_width", self.half_width))
        }


class Measures:
    """From `begins_s` to `ends_s`: requests that come then, and tokens of any request."""

    def __init__(self, begins_s: float, ends_s: float) -> None:
        self.begins_s, self.ends_s = begins_s, ends_s
        width = (ends_s - begins_s) / NUM_BATCHES  # infinite: all is in the first part
        self._edges = [begins_s + width * number for number in range(1, NUM_BATCHES)]
        self._gaps = [Histogram() for _ in range(NUM_BATCHES)]
        self._ttfts: list[list[float]] = [[] for _ in range(NUM_BATCHES)]
        self._e2es: list[list[float]] = [[] for _ in range(NUM_BATCHES)]
        self.num_refused = 0
        self.num_tokens = 0
        self.ttft_missed = asyncio.Event()
        self._late_after_s, self._late_left = math.inf, math.inf

    def watch_ttft(self, target_s: float, num_late: float) -> None:
        """Says `ttft_missed` once more than so many first tokens took longer than that."""
        self._late_after_s, self._late_left = target_s, num_late

    def measured_s(self, began_s: float, ended_s: float) -> float:
        """Of that time, what is measured."""
        return max(0.0, min(ended_s, self.ends_s) - max(began_s, self.begins_s))

    def note_gaps(self, now_s: float, seconds: float, count: int) -> None:
        """So many tokens have come, so long after the one before each."""
        if self.begins_s <= now_s < self.ends_s:
            self._gaps[bisect_right(self._edges, now_s)].add(seconds, count)
            self.num_tokens += count

    def note_first(self, arrived_s: float, seconds: float) -> None:
        """Of a measured request the first token came."""
        self._ttfts[bisect_right(self._edges, arrived_s)].append(seconds)
        if seconds > self._late_after_s:
            self._late_left -= 1
            if self._late_left < 0:
                self.ttft_missed.set()

    def note_end(self, arrived_s: float, seconds: float) -> None:
        """Of a measured request the last token came."""
        self._e2es[bisect_right(self._edges, arrived_s)].append(seconds)

    def note_refused(self, arrived_s: float) -> None:
        """A measured request was refused: its first token never comes."""
        self.num_refused += 1
        self.note_first(arrived_s, math.inf)

    def ttft(self, percent: float) -> Estimate:
        """Of all measured requests, refused ones included: infinite where these are too many."""
        return _of_lists(self._ttfts, lambda values: _percentile(values, percent))

    def e2e(self, percent: float) -> Estimate:
        """Of those that were served."""
        return _of_lists(self._e2es, lambda values: _percentile(values, percent))

    def e2e_mean(self) -> float:
        """Seconds."""
        return _mean([value for values in self._e2es for value in values])

    def ttft_mean(self) -> Estimate:
        """Of those that were served."""
        return _of_lists([[v for v in values if v < math.inf] for values in self._ttfts], _mean)

    def itl(self, percent: float) -> Estimate:
        """Of all gaps between tokens."""
        together = Histogram()
        for histogram in self._gaps:
            together.merge(histogram)
        parts = [h.percentile(percent) for h in self._gaps if h.count]
        return Estimate(together.percentile(percent), _half_width(parts))


def _of_lists(parts: Sequence[list[float]], figure: Callable[[list[float]], float]) -> Estimate:
    together = [value for values in parts for value in values]
    return Estimate(figure(together), _half_width([figure(v) for v in parts if v]))


def _percentile(values: list[float], percent: float) -> float:
    """The least that `percent` of the values do not exceed; 0 where there is none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _half_width(parts: list[float]) -> float:
    """Infinite where a part is, or where fewer than all parts have a figure."""
    if len(parts) < NUM_BATCHES or not all(map(math.isfinite, parts)):
        return math.inf
    mean = _mean(parts)
    variance = math.fsum((part - mean) ** 2 for part in parts) / (len(parts) - 1)
    return _T_95 * math.sqrt(variance / len(parts))
