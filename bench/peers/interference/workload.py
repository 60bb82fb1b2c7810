"""Interference: streams that decode while long prompts arrive; what a phase of it measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from legato.bench.workload import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a stream: more than any engine decodes in a phase. It is cut off at the phase's end.
STREAM_ANSWER_TOKENS = 6000


@dataclass(frozen=True)
class Interference:
    """`num_streams` decode; in a phase with arrivals a prompt comes each `every_s`, open loop.

    A phase: the streams begin; `settle_s` after the last of them had its first token they are
    watched, for `window_s`; then prompts that still wait have `drain_s` for their first token.
    """

    num_streams: int = 4
    stream_prompt_tokens: int = 128
    prompt_tokens: int = 1024
    answer_tokens: int = 16  # of each prompt that arrives: more than one, so it decodes too
    every_s: float = 2.0
    settle_s: float = 2.0
    window_s: float = 20.0
    drain_s: float = 15.0
    begin_timeout_s: float = 60.0  # for the first tokens of all streams

    def __post_init__(self) -> None:
        for name in ("num_streams", "stream_prompt_tokens", "prompt_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("every_s", "settle_s", "window_s", "drain_s", "begin_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.every_s > self.window_s:
            raise ValueError(
                f"every_s {self.every_s:g} is beyond window_s {self.window_s:g}: nothing arrives"
            )

    @property
    def context_tokens(self) -> int:
        """Longest context of a request."""
        return max(
            self.stream_prompt_tokens + STREAM_ANSWER_TOKENS,
            self.prompt_tokens + self.answer_tokens,
        )

    @property
    def phase_s(self) -> float:
        """The longest a phase takes."""
        return self.begin_timeout_s + self.settle_s + self.window_s + self.drain_s

    def phase(self, vocab_size: int, number: int, *, arrivals: bool) -> PhasePlan:
        """No two prompts of phases with other numbers share a beginning."""
        dues: list[float] = []
        while arrivals and len(dues) * self.every_s < self.window_s:
            dues.append(len(dues) * self.every_s)
        first = number * 1000

        def prompt(index: int, length: int) -> list[int]:
            # Off the first ids, which are a tokenizer's special ones.
            span = vocab_size - 16
            return [16 + (1 + 7919 * (first + index) + 31 * i) % span for i in range(length)]

        return PhasePlan(
            streams=[prompt(i, self.stream_prompt_tokens) for i in range(self.num_streams)],
            prompts=[prompt(self.num_streams + i, self.prompt_tokens) for i in range(len(dues))],
            dues_s=dues,
            answer_tokens=self.answer_tokens,
            settle_s=self.settle_s,
            window_s=self.window_s,
            drain_s=self.drain_s,
            begin_timeout_s=self.begin_timeout_s,
            stream_answer_tokens=STREAM_ANSWER_TOKENS,
        )


@dataclass(frozen=True)
class PhasePlan:
    """Token ids and times."""

    streams: list[list[int]]
    prompts: list[list[int]]
    dues_s: list[float]  # of each prompt, since the window began
    answer_tokens: int
    settle_s: float
    window_s: float
    drain_s: float
    begin_timeout_s: float
    stream_answer_tokens: int


@dataclass
class Deliveries:
    """When a request's tokens came, in seconds since the phase began: those of one message or step
    are one delivery.
    """

    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def note(self, at_s: float, count: int) -> None:
        """`count` tokens came; none is no delivery."""
        if count:
            self.times_s.append(at_s)
            self.counts.append(count)


@dataclass
class PhaseRecord:
    """What came when, in seconds since the phase began."""

    streams: list[Deliveries]
    prompts: list[Deliveries]
    begin_s: float | None = None  # of the window; None: the streams never all began
    ended_s: float = 0.0  # when they were cut off

    @classmethod
    def empty(cls, plan: PhasePlan) -> PhaseRecord:
        """To be filled."""
        return cls([Deliveries() for _ in plan.streams], [Deliveries() for _ in plan.prompts])

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> PhaseRecord:
        """From `as_json`, or from a runner that speaks it.

        Raises:
            ValueError: times and counts do not go together.
        """
        record = cls(
            [Deliveries(**one) for one in values["streams"]],
            [Deliveries(**one) for one in values["prompts"]],
            values["begin_s"],
            float(values["ended_s"]),
        )
        for one in (*record.streams, *record.prompts):
            if len(one.times_s) != len(one.counts):
                raise ValueError(f"{len(one.times_s)} times for {len(one.counts)} deliveries")
        return record

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class PhaseFigures:
    """Of the streams, gaps between deliveries; of the prompts, from when each was due."""

    itl_p50_s: float
    itl_p99_s: float
    worst_gap_s: float
    num_gaps: int
    tokens_per_s: float  # of all streams, in the window
    ttft_p50_s: float | None  # None where nothing arrived
    ttft_worst_s: float | None
    num_prompts: int


def figures(plan: PhasePlan, record: PhaseRecord) -> PhaseFigures:
    """A gap counts if any of it lies in the window, a last one that never closed included: an
    engine that stops delivering has the longest gap of all.

    Raises:
        ValueError: streams or prompts are missing, a stream did not begin or ended too early, or a
            prompt had no token before the phase ended: such a phase says nothing.
    """
    if len(record.streams) != len(plan.streams) or len(record.prompts) != len(plan.prompts):
        raise ValueError(
            f"{len(record.streams)} of {len(plan.streams)} streams, "
            f"{len(record.prompts)} of {len(plan.prompts)} prompts"
        )
    if record.begin_s is None:
        begun = sum(bool(stream.times_s) for stream in record.streams)
        raise ValueError(
            f"{begun} of {len(plan.streams)} streams had a token within {plan.begin_timeout_s:g} s"
        )
    begin_s, end_s = record.begin_s, record.begin_s + plan.window_s
    if record.ended_s < end_s:
        raise ValueError(f"the phase ended {end_s - record.ended_s:.1f} s before its window")
    gaps: list[float] = []
    tokens = 0
    for number, stream in enumerate(record.streams):
        times = stream.times_s
        if not times or times[0] > begin_s:
            raise ValueError(f"stream {number} had no token before the window began")
        if sum(stream.counts) >= plan.stream_answer_tokens:
            raise ValueError(f"stream {number} ended within the phase")
        gaps += [
            later - earlier
            for earlier, later in pairwise([*times, record.ended_s])
            if earlier < end_s and later > begin_s
        ]
        tokens += sum(
            count for at, count in zip(times, stream.counts, strict=True) if begin_s < at <= end_s
        )
    ttfts = _ttfts(plan, record, begin_s)
    return PhaseFigures(
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        worst_gap_s=max(gaps),
        num_gaps=len(gaps),
        tokens_per_s=tokens / plan.window_s,
        ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
        ttft_worst_s=max(ttfts, default=None),
        num_prompts=len(ttfts),
    )


def _ttfts(plan: PhasePlan, record: PhaseRecord, begin_s: float) -> Sequence[float]:
    missing = sum(not prompt.times_s for prompt in record.prompts)
    if missing:
        raise ValueError(
            f"{missing} of {len(plan.prompts)} prompts had no token {plan.drain_s:g} s after the "
            "window"
        )
    return [
        prompt.times_s[0] - begin_s - due
        for prompt, due in zip(record.prompts, plan.dues_s, strict=True)
    ]
