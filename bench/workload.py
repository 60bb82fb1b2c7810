"""Workload: a fixed set of requests for a bare engine, and the figures of one run of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Workload:
    """`num_requests` alike, at most `num_at_once` of them under way; greedy, EOS ignored."""

    name: str
    num_requests: int
    num_at_once: int
    prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_at_once", "prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def context_tokens(self) -> int:
        """Longest context of a request."""
        return self.prompt_tokens + self.max_tokens

    def prompts(self, vocab_size: int, run: int = 0) -> list[list[int]]:
        """Token ids of each prompt.

        No two share a beginning, nor do those of different runs: no cache of prefixes may help.
        """
        first = run * self.num_requests
        return [
            [(1 + 7919 * number + 31 * i) % vocab_size for i in range(self.prompt_tokens)]
            for number in range(first, first + self.num_requests)
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", 1, 1, 128, 128),
        Workload("batch8", 16, 8, 128, 64),
        Workload("batch32", 64, 32, 128, 64),
        Workload("prompt1024", 1, 1, 1024, 1),
        Workload("prompt2048", 1, 1, 2048, 1),
        # For models of a billion weights and more, where the ones above take minutes.
        Workload("single-short", 1, 1, 128, 32),
        Workload("batch8-short", 8, 8, 128, 32),
    )
}


@dataclass(frozen=True)
class RequestTimes:
    """One request; times in seconds on one clock."""

    sent_s: float
    token_times_s: tuple[float, ...]


@dataclass(frozen=True)
class Figures:
    """What one run of a workload measured."""

    wall_s: float  # first request sent until the last token
    output_tokens_per_s: float  # over the whole run, prefill included
    prompt_tokens_per_s: float  # of a single prompt: its length over its TTFT; of many: over wall_s
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float | None  # None where answers have one token
    itl_p99_s: float | None


def summarise(workload: Workload, requests: Sequence[RequestTimes]) -> Figures:
    """The figures.

    Raises:
        ValueError: a request or a token is missing: such a run says nothing.
    """
    if len(requests) != workload.num_requests:
        raise ValueError(
            f"workload {workload.name}: {len(requests)} of {workload.num_requests} requests ended"
        )
    for number, request in enumerate(requests):
        if len(request.token_times_s) != workload.max_tokens:
            raise ValueError(
                f"workload {workload.name}: request {number} has {len(request.token_times_s)} "
                f"of {workload.max_tokens} tokens"
            )
    started_s = min(request.sent_s for request in requests)
    wall_s = max(request.token_times_s[-1] for request in requests) - started_s
    ttfts = [request.token_times_s[0] - request.sent_s for request in requests]
    gaps = [b - a for request in requests for a, b in pairwise(request.token_times_s)]
    prompt_s = ttfts[0] if workload.num_requests == 1 else wall_s
    return Figures(
        wall_s=wall_s,
        output_tokens_per_s=workload.num_requests * workload.max_tokens / wall_s,
        prompt_tokens_per_s=workload.num_requests * workload.prompt_tokens / prompt_s,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(gaps, 50) if gaps else None,
        itl_p99_s=percentile(gaps, 99) if gaps else None,
    )


def percentile(values: Sequence[float], rank: int) -> float:
    """The smallest value with `rank` percent of all at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * rank / 100) - 1)]
