"""ServerMetrics: what a server's /metrics say of its own times, between two looks."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCE = (
    "/metrics, of all requests between the greeting and the end of the load, whoever sent them; "
    "percentiles estimated from buckets and mean"
)
_PHASES = ("queue", "ticket", "prefill", "handoff", "decode", "delivery")
# By Timings' names: histogram, and the label that it must have. Legato's, else vLLM's.
_HISTOGRAMS: dict[str, tuple[tuple[str, tuple[str, str] | None], ...]] = {
    **{f"{phase}_s": (("legato_phase_seconds", ("phase", phase)),) for phase in _PHASES},
    "prefill_model_s": (("legato_prefill_model_seconds", None),),
    "kv_transfer_s": (("legato_kv_transfer_seconds", None),),
}
_VLLM = {
    "queue_s": "vllm:request_queue_time_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds",
    "decode_s": "vllm:request_decode_time_seconds",
}
for _name, _histogram in _VLLM.items():
    _HISTOGRAMS[_name] = (*_HISTOGRAMS[_name], (_histogram, None))

_RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class ServerMetrics:
    """One look: of each of our names the buckets, which count all below a bound, and the sum."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[float, float]] = {}
        self._sums: dict[str, float] = {}

    @classmethod
    def parse(cls, texts: Sequence[str]) -> ServerMetrics:
        """Of all routers together.

        Raises:
            ValueError: a text is not in Prometheus' format.
        """
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name].append((sample.labels, sample.value))
        made = cls()
        for name, sources in _HISTOGRAMS.items():
            for histogram, label in sources:
                if f"{histogram}_bucket" not in samples:
                    continue
                buckets: dict[float, float] = defaultdict(float)
                for labels, value in samples[f"{histogram}_bucket"]:
                    if label is None or labels.get(label[0]) == label[1]:
                        buckets[float(labels["le"])] += value
                made._buckets[name] = dict(buckets)
                made._sums[name] = sum(
                    value
                    for labels, value in samples[f"{histogram}_sum"]
                    if label is None or labels.get(label[0]) == label[1]
                )
                break
        return made

    def since(self, before: ServerMetrics) -> dict[str, dict[str, float] | None]:
        """Spreads in seconds of what came between the two looks; without the largest value, which
        buckets do not tell.
        """
        spreads: dict[str, dict[str, float] | None] = {}
        for name, buckets in self._buckets.items():
            old = before._buckets.get(name, {})
            counts = {bound: count - old.get(bound, 0.0) for bound, count in buckets.items()}
            total = counts.get(math.inf, 0.0)
            if total <= 0:
                continue
            mean = (self._sums[name] - before._sums.get(name, 0.0)) / total
            spreads[name] = {
                # Buckets may be far wider than what is in them; no more than 1 - share of values
                # that are not negative can lie beyond mean / (1 - share).
                **{
                    rank: round(min(_quantile(counts, share), mean / (1 - share)), 6)
                    for rank, share in _RANKS.items()
                },
                "mean": round(mean, 6),
                "count": int(total),
            }
        return spreads


def _quantile(counts: Mapping[float, float], share: float) -> float:
    """Between its bucket's bounds by the straight line; the last finite bound beyond that."""
    wanted = share * counts[math.inf]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *sorted(counts.items())]):
        if upto >= wanted and upto > below:
            way = (wanted - below) / (upto - below)
            return low if math.isinf(high) else low + (high - low) * way
    return 0.0
