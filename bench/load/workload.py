"""LoadWorkload: which requests are sent, when, and what stands in them; by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from legato.plan.lengths import Lengths
    from legato.plan.trace import TraceLine

MAX_REQUESTS = 10_000_000
MAX_CONCURRENCY = 10_000


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
    num_requests: int | None = None
    duration_s: float | None = None
    prefix_share: float = 0.0  # of a prompt's tokens, those that are the same in all prompts
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.inputs is None) or (self.inputs is None) != (
            self.outputs is None
        ):
            raise ValueError("lengths are those of a trace, or input and output tokens are given")
        if self.rate_per_s is not None and self.concurrency is not None:
            raise ValueError("a load has a rate or a concurrency, not both")
        if self.rate_per_s is None and self.concurrency is None and not self._is_timed:
            raise ValueError("a load needs a rate, a concurrency, or a trace with at_s")
        if self.num_requests is None and self.duration_s is None and self.trace is None:
            raise ValueError("a load needs a number of requests or a duration")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"the prefix share must be in [0, 1], got {self.prefix_share}")

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
        """In the order in which they are sent; the same for a seed, however fast they are."""
        draw, now_s = random.Random(self.seed), 0.0
        for number in range(self.num_requests or MAX_REQUESTS):
            if self.trace is not None and number >= len(self.trace):
                return
            if self.trace is not None:
                line = self.trace[number]
                lengths = line.input_tokens, line.output_tokens
            else:
                assert self.inputs is not None
                assert self.outputs is not None
                lengths = self.inputs.quantile(draw.random()), self.outputs.quantile(draw.random())
            at_s: float | None = None
            if self.rate_per_s is not None:
                at_s = now_s = now_s + draw.expovariate(self.rate_per_s)
            elif self.concurrency is None:
                assert self.trace is not None
                at_s = self.trace[number].at_s
            if at_s is not None and self.duration_s is not None and at_s >= self.duration_s:
                return
            yield Planned(number, at_s, *lengths)

    def message(self, planned: Planned, vocab_size: int) -> generation_pb2.GenerateRequest:
        """Greedy, and as long as it is planned: EOS is ignored."""
        num_shared = round(self.prefix_share * planned.input_tokens)
        shared = np.random.default_rng(self.seed).integers(0, vocab_size, num_shared)
        own = np.random.default_rng([self.seed + 1, planned.number]).integers(
            0, vocab_size, planned.input_tokens - num_shared
        )
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[*shared.tolist(), *own.tolist()]),
            sampling=common_pb2.SamplingParams(
                max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True
            ),
        )
