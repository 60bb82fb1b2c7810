"""Curves: what the pictures of a run show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.load.window import measured_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample

    Points = tuple[tuple[float, float], ...]

MAX_POINTS = 240
MAX_BINS = 60
MIN_BIN_S = 0.1


@dataclass(frozen=True)
class Curves:
    """Points are (x, y). Times are in seconds since the first request was due."""

    ttft: Points  # seconds, share of the requests that had it by then
    itl: Points  # seconds, share of the gaps in the window that are no longer
    tokens_per_s: Points  # time, rate until then
    under_way: Points  # time, requests sent and not ended, on average until then
    window: tuple[float, float] | None


def curves(samples: Sequence[Sample]) -> Curves:
    """Of all samples of a run, at least one."""
    window = measured_window(samples)
    good = [s for s in samples if s.ok and not s.is_warmup]
    zero_s = min(sample.due_s for sample in samples)
    last_s = max(max(s.ended_s or s.sent_s, *s.token_times_s[-1:], s.sent_s) for s in samples)
    bin_s = max(MIN_BIN_S, (last_s - zero_s) / MAX_BINS)
    num_bins = int((last_s - zero_s) / bin_s) + 1
    tokens, busy_s = [0] * num_bins, [0.0] * num_bins
    for sample in samples:
        for at_s in sample.token_times_s:
            tokens[min(num_bins - 1, int((at_s - zero_s) / bin_s))] += 1
        begin_s, end_s = sample.sent_s - zero_s, (sample.ended_s or last_s) - zero_s
        for number in range(int(begin_s / bin_s), min(num_bins - 1, int(end_s / bin_s)) + 1):
            within_s = min(end_s, (number + 1) * bin_s) - max(begin_s, number * bin_s)
            busy_s[number] += max(0.0, within_s)
    return Curves(
        ttft=_distribution([s.ttft_s for s in good]),
        itl=_distribution([] if window is None else window.gaps_s(samples)),
        tokens_per_s=tuple(((n + 1) * bin_s, count / bin_s) for n, count in enumerate(tokens)),
        under_way=tuple(((n + 1) * bin_s, busy / bin_s) for n, busy in enumerate(busy_s)),
        window=None if window is None else (window.begin_s - zero_s, window.end_s - zero_s),
    )


def _distribution(values: Sequence[float]) -> Points:
    """At most MAX_POINTS of the cumulative distribution, its ends among them."""
    ordered = sorted(values)
    last = len(ordered) - 1
    if last < 1:
        return tuple((value, 1.0) for value in ordered)
    ranks = sorted({round(last * n / (MAX_POINTS - 1)) for n in range(MAX_POINTS)})
    return tuple((ordered[rank], (rank + 1) / len(ordered)) for rank in ranks)
