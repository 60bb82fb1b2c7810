"""LoadWorkload: which requests are sent, when, and what stands in them; by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from legato.bench.load.arrivals import POISSON, Arrivals
from legato.bench.load.warmup import NO_WARMUP, Place, Span, Warmup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from legato.plan.lengths import Lengths
    from legato.plan.trace import TraceLine

MAX_REQUESTS = 10_000_000
MAX_CONCURRENCY = 10_000
MAX_SEED = 2**31 - 1


def draw_seed() -> int:
    """One that nobody has had: prompts that came before would be found in the prefix cache."""
    return random.SystemRandom().randint(0, MAX_SEED)


@dataclass(frozen=True)
class Planned:
    """One request. `at_s`: since the run's begin; None: when the one before it has ended."""

    number: int
    at_s: float | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoadWorkload:
    """Open: `rate_per_s` by chance, or the trace's times, whatever becomes of the requests before.
    Closed: `concurrency` at a time. It ends by number, by time, or with the trace.
    """

    inputs: Lengths | None
    outputs: Lengths | None
    trace: Sequence[TraceLine] | None = None
    rate_per_s: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None  # that count, as with the duration: without the warm-up
    duration_s: float | None = None
    prefix_share: float = 0.0  # of a prompt's tokens, those that are the same in all prompts
    seed: int = field(default_factory=draw_seed)  # of lengths, times and prompts
    arrivals: Arrivals = POISSON  # with a rate
    warmup: Warmup = NO_WARMUP  # of a trace, its own first requests

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.inputs is None) or (self.inputs is None) != (
            self.outputs is None
        ):
            raise ValueError("lengths are those of a trace, or input and output tokens are given")
        if self.rate_per_s is not None and self.concurrency is not None:
            raise ValueError("a load has a rate or a concurrency, not both")
        if self.rate_per_s is None and self.concurrency is None and not self._is_timed:
            raise ValueError("a load needs a rate, a concurrency, or a trace with at_s")
        if self.rate_per_s is None and self.arrivals != POISSON:
            raise ValueError("arrivals are those of a load with a rate")
        if self.num_requests is None and self.duration_s is None and self.trace is None:
            raise ValueError("a load needs a number of requests or a duration")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"the prefix share must be in [0, 1], got {self.prefix_share}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"the seed must be in [0, {MAX_SEED}], got {self.seed}")

    @property
    def _is_timed(self) -> bool:
        return self.trace is not None and self.trace[0].at_s is not None

    @property
    def is_open(self) -> bool:
        """Whether requests come at times of their own."""
        return self.concurrency is None

    @property
    def longest(self) -> tuple[int, int]:
        """Most tokens of a prompt, and of prompt and answer."""
        if self.trace is not None:
            lines = self.trace
            return max(x.input_tokens for x in lines), max(
                x.input_tokens + x.output_tokens for x in lines
            )
        assert self.inputs is not None
        assert self.outputs is not None
        return self.inputs.most, self.inputs.most + self.outputs.most

    def requests(self) -> Iterator[Planned]:
        """In the order in which they are sent, the warm-up first; the same for a seed, however fast
        they are. A closed load ends earlier where its time is over.
        """
        draw, now_s, span = random.Random(self.seed), 0.0, Span(self)
        for number in range(self._most_requests):
            if self.trace is not None:
                line = self.trace[number]
                lengths = line.input_tokens, line.output_tokens
            else:
                assert self.inputs is not None
                assert self.outputs is not None
                lengths = self.inputs.quantile(draw.random()), self.outputs.quantile(draw.random())
            at_s: float | None = None
            if self.rate_per_s is not None:
                at_s = now_s = now_s + self.arrivals.gap_s(draw, self.rate_per_s)
            elif self.concurrency is None:
                assert self.trace is not None
                at_s = self.trace[number].at_s
            if at_s is not None and span.place(number, at_s) is Place.OVER:
                return
            yield Planned(number, at_s, *lengths)

    @property
    def _most_requests(self) -> int:
        most = MAX_REQUESTS if self.trace is None else len(self.trace)
        if self.num_requests is None or self.warmup.seconds:
            return most  # how many come in the warm-up is seen as it runs
        return min(most, self.num_requests + self.warmup.num_requests)

    def settings(self) -> dict[str, object]:
        """As JSON, without what is not set."""
        told = {
            "rate_per_s": self.rate_per_s,
            "arrivals": None if self.rate_per_s is None else str(self.arrivals),
            "concurrency": self.concurrency,
            "num_requests": self.num_requests,
            "duration_s": self.duration_s,
            "input_tokens": None if self.inputs is None else str(self.inputs),
            "output_tokens": None if self.outputs is None else str(self.outputs),
            "trace_lines": None if self.trace is None else len(self.trace),
            "prefix_share": self.prefix_share or None,
            "warmup": str(self.warmup),
            "seed": self.seed,
        }
        return {name: value for name, value in told.items() if value is not None}

    def draw(self, planned: Planned, count: int, limit: int) -> list[int]:
        """The request's prompt: `count` numbers below `limit`, which are token ids or stand for
        words. What all prompts share comes first.
        """
        num_shared = round(self.prefix_share * count)
        shared = np.random.default_rng(self.seed).integers(0, limit, num_shared)
        own = np.random.default_rng([self.seed + 1, planned.number]).integers(
            0, limit, count - num_shared
        )
        return [*shared.tolist(), *own.tolist()]
