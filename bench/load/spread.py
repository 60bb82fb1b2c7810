"""spread: the percentiles of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.bench.workload import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """RANKS, mean and count; None of no value."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {name: round(percentile(ordered, rank), 6) for name, rank in RANKS.items()}
    return ranks | {"mean": round(sum(ordered) / len(ordered), 6), "count": len(ordered)}
