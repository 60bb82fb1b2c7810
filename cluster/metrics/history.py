"""History: the last minutes of one router, a sample a second, for who looks at it live."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.cluster.admission import Admission
    from legato.cluster.metrics.meters import Meters
    from legato.cluster.metrics.tallies import Spreads
    from legato.cluster.pool_view import PoolView

PERIOD_S = 1.0
KEPT_S = 300
WINDOW_S = 10  # that times and rates are taken over


@dataclass(frozen=True)
class Sample:
    """At one moment, of the WINDOW_S before it; None where nothing of the kind happened."""

    at_s: float  # Unix time
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    tokens_s: float
    requests_s: float
    handoffs_s: float
    handoff_bytes_s: float
    prefix_hit_share: float | None  # of prompt tokens
    queued: int
    running: int


@dataclass(frozen=True)
class _Totals:
    ttft: list[int]
    itl: list[int]
    tokens: float
    requests: float
    handoffs: float
    handoff_bytes: float
    prompt_tokens: float
    cached_tokens: float


class History:
    """Costs one look at the sums a second."""

    def __init__(self, meters: Meters, pool: PoolView, admission: Admission) -> None:
        self._meters = meters
        self._pool = pool
        self._admission = admission
        self._task: asyncio.Task[None] | None = None
        self._totals: deque[tuple[float, _Totals]] = deque(maxlen=round(WINDOW_S / PERIOD_S) + 1)
        self.samples: deque[Sample] = deque(maxlen=round(KEPT_S / PERIOD_S))

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            self.look(time.time())
            await asyncio.sleep(PERIOD_S)

    def look(self, now_s: float) -> None:
        """Takes a sample; `now_s` is the Unix time."""
        now = self._sum()
        self._totals.append((now_s, now))
        since_s, before = self._totals[0]
        span_s = max(PERIOD_S, now_s - since_s)
        ttft = [a - b for a, b in zip(now.ttft, before.ttft, strict=True)]
        itl = [a - b for a, b in zip(now.itl, before.itl, strict=True)]
        num_prompt = now.prompt_tokens - before.prompt_tokens
        num_cached = now.cached_tokens - before.cached_tokens
        ttft_bounds, itl_bounds = (s.metric.bounds for s in (self._meters.ttft, self._meters.itl))
        self.samples.append(
            Sample(
                at_s=now_s,
                ttft_p50_s=quantile(ttft_bounds, ttft, 0.5),
                ttft_p90_s=quantile(ttft_bounds, ttft, 0.9),
                itl_p50_s=quantile(itl_bounds, itl, 0.5),
                itl_p90_s=quantile(itl_bounds, itl, 0.9),
                tokens_s=(now.tokens - before.tokens) / span_s,
                requests_s=(now.requests - before.requests) / span_s,
                # Those of a worker that has gone are in the sum no more.
                handoffs_s=max(0.0, now.handoffs - before.handoffs) / span_s,
                handoff_bytes_s=max(0.0, now.handoff_bytes - before.handoff_bytes) / span_s,
                prefix_hit_share=num_cached / num_prompt if num_prompt else None,
                queued=self._admission.num_queued,
                running=sum(v.load.running for v in self._pool.views() if v.load is not None),
            )
        )

    def _sum(self) -> _Totals:
        meters = self._meters
        senders = [v.load for v in self._pool.views() if v.endpoint.role == "prefill" and v.load]
        return _Totals(
            ttft=_counts(meters.ttft),
            itl=_counts(meters.itl),
            tokens=meters.generated_tokens.total,
            requests=meters.requests.total,
            handoffs=sum(load.kv_transfers_completed for load in senders),
            handoff_bytes=sum(load.kv_bytes_sent for load in senders),
            prompt_tokens=meters.prompt_tokens.total,
            cached_tokens=meters.cached_tokens.total,
        )


def _counts(spreads: Spreads) -> list[int]:
    """Of all labels together."""
    counts = [0] * (len(spreads.metric.bounds) + 1)
    for spread in spreads.values.values():
        counts = [a + b for a, b in zip(counts, spread.counts, strict=True)]
    return counts


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float | None:
    """Where that share of the values lies below, evenly spread within a bucket; the last bound for
    what is above it.
    """
    left = share * sum(counts)
    if not left:
        return None
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return lower + (bound - lower) * left / count
        left -= count
        lower = bound
    return bounds[-1]
