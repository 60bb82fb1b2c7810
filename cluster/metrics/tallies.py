"""Count, Spread: what happened so far, as sums that cost a fraction of a microsecond to add to.

All of a router's are changed and read on its event loop alone: there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric as Family

    from legato.cluster.metrics.catalogue import Metric

    Labels = tuple[str, ...]


class Count:
    """A counter of one family."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[Labels, float] = {}
        if not metric.labels:
            self.values[()] = 0.0

    def add(self, amount: float = 1.0, labels: Labels = ()) -> None:
        """`labels`: values, in the order of the family's."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    @property
    def total(self) -> float:
        """Of all labels."""
        return sum(self.values.values())

    def family(self) -> Family:
        """To be told."""
        return counter(self.metric, self.values.items())


class Spread:
    """One histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # above each bound and up to the next
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """The value was seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were added."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many values were not above."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Spreads:
    """The histograms of one family, by their labels."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[Labels, Spread] = {}
        if not metric.labels:
            self.of()

    def of(self, *labels: str) -> Spread:
        """That of these labels, in the order of the family's."""
        spread = self.values.get(labels)
        if spread is None:
            spread = self.values[labels] = Spread(self.metric.bounds)
        return spread

    def family(self) -> Family:
        """To be told."""
        metric = self.metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, spread in self.values.items():
            family.add_metric(labels, spread.buckets(), spread.sum)
        return family


def counter(metric: Metric, values: Iterable[tuple[Labels, float]]) -> Family:
    """A family of counters."""
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def gauge(metric: Metric, values: Iterable[tuple[Labels, float]]) -> Family:
    """A family of gauges."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family
