"""LoadSettings: claim 9, the same load under settings for throughput and under ones for latency."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import Axis, LineChart, Series
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, check_at_least, number, rounds_words
from legato.bench.experiments.timed_service import timed_service
from legato.cluster.text.model_text import ModelText
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.bench.experiments.timed_service import AnswerTimes, TimedService

PROMPT_TOKENS, ANSWER_TOKENS = 32, 64
NUM_REQUESTS = 24
LARGE_BATCH, SMALL_BATCH = 32, 8
MAX_ROUNDS = 5
TURN_TIMEOUT_S = 300.0
HIGHER, LATER, SLOWER = 1.1, 1.0, 1.2


@dataclass(frozen=True)
class Burst:
    """One round of one setting: all requests sent at once."""

    tokens_per_s: float  # all tokens, over the time until the last one
    whole_s: tuple[float, ...]  # of each answer until its last token, ascending
    median_ttft_s: float
    median_gap_s: float

    @classmethod
    def of(cls, answers: Sequence[AnswerTimes]) -> Burst:
        """Of whole answers."""
        begun_s = min(answer.sent_s for answer in answers)
        ended_s = max(answer.token_times_s[-1] for answer in answers)
        return cls(
            sum(len(answer.token_times_s) for answer in answers) / (ended_s - begun_s),
            tuple(sorted(answer.whole_s for answer in answers)),
            statistics.median(answer.ttft_s for answer in answers),
            statistics.median(gap for answer in answers for gap in answer.gaps_s),
        )

    @property
    def median_whole_s(self) -> float:
        """Of the answers."""
        return statistics.median(self.whole_s)


def checks(batch_first: Sequence[Burst], latency_first: Sequence[Burst]) -> tuple[Check, ...]:
    """Round by round. Where batch-first has no higher rate the claim cannot be tried."""
    named = LoadSettings.criteria

    def ratios(field: str) -> Rounds:
        return Rounds.ratios(
            [getattr(burst, field) for burst in batch_first],
            [getattr(burst, field) for burst in latency_first],
        )

    rate = check_at_least(named[0], ratios("tokens_per_s"), HIGHER)
    if rate.answer is not Answer.YES:
        words = "no higher rate was shown to compare with"
        return (
            Check(named[0], rate.measured, Answer.UNCLEAR),
            Check(named[1], words, Answer.UNCLEAR),
            Check(named[2], words, Answer.UNCLEAR),
        )
    return (
        rate,
        check_at_least(named[1], ratios("median_whole_s"), LATER),
        check_at_least(named[2], ratios("median_gap_s"), SLOWER),
    )


class LoadSettings(Experiment):
    """Two services of one colocated worker each stay up and take turns, the other one idle."""

    number, name = 9, "load-settings"
    claim = "A higher total token rate does not mean an earlier answer."
    criteria = (
        f"a burst has at least {HIGHER:g} times the tokens/s with batch-first settings "
        f"(--max-batch-size {LARGE_BATCH}) than with latency-first ones ({SMALL_BATCH})",
        "and yet its median answer is whole no earlier: batch-first over latency-first is at least "
        f"{LATER:g}",
        f"and the median gap between tokens is at least {SLOWER:g} times as long",
    )
    weight = 2.5

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Worker processes of their own; the lab's model is given back before."""
        context = lab.engine.model.config.context_length
        if context < PROMPT_TOKENS + ANSWER_TOKENS:
            raise CannotMeasureError(
                f"a request needs {PROMPT_TOKENS + ANSWER_TOKENS} tokens, limit {context}: the "
                "model's context"
            )
        lab.check_room(2)
        lab.release()
        bursts = asyncio.run(_measure(lab, budget))
        if not bursts[LARGE_BATCH]:
            raise CannotMeasureError("the time was over before a round could begin")
        return _outcome(bursts[LARGE_BATCH], bursts[SMALL_BATCH], lab.settings.num_threads)


async def _measure(lab: Lab, budget: TimeBudget) -> dict[int, list[Burst]]:
    text = ModelText.load(resolve_model(lab.settings.model))
    bursts: dict[int, list[Burst]] = {LARGE_BATCH: [], SMALL_BATCH: []}
    async with AsyncExitStack() as stack:
        services: dict[int, TimedService] = {}
        with budget.apart():
            for size in bursts:
                services[size] = await stack.enter_async_context(
                    timed_service(
                        lab.settings,
                        text,
                        ("colocated",),
                        lab.settings.num_threads,
                        *("--max-batch-size", str(size)),
                    )
                )
        for _ in budget.rounds(MAX_ROUNDS):
            for size, service in services.items():
                async with asyncio.timeout(TURN_TIMEOUT_S):
                    answers = await service.answers(
                        NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS, NUM_REQUESTS
                    )
                bursts[size].append(Burst.of(answers))
    return bursts


def _outcome(batch_first: list[Burst], latency_first: list[Burst], num_threads: int) -> Outcome:
    both = (
        (f"batch-first ({LARGE_BATCH})", batch_first),
        (f"latency-first ({SMALL_BATCH})", latency_first),
    )
    rows = tuple(
        (
            name,
            Rounds(tuple(b.tokens_per_s for b in bursts)).words(),
            Rounds(tuple(b.median_whole_s for b in bursts)).words(),
            Rounds(tuple(b.whole_s[0] for b in bursts)).words(),
            Rounds(tuple(b.whole_s[-1] for b in bursts)).words(),
            Rounds(tuple(b.median_ttft_s for b in bursts)).words(),
            Rounds(tuple(b.median_gap_s for b in bursts)).words("", 1000),
        )
        for name, bursts in both
    )
    head: tuple[str, ...] = (
        "settings",
        "tokens/s",
        "median answer whole, s",
        "first, s",
        "last, s",
    )
    head += ("median TTFT, s", "median gap, ms")
    chart = LineChart(
        "Answers that are whole, over the time since the burst",
        f"{NUM_REQUESTS} requests sent at once. "
        + "; ".join(
            f"{name}: the first whole after {number(_middle(bursts).whole_s[0])} s, the last after "
            f"{number(_middle(bursts).whole_s[-1])} s"
            for name, bursts in both
        ),
        Axis("seconds since the burst was sent"),
        Axis("answers that are whole"),
        tuple(
            Series(name, tuple((s, float(i + 1)) for i, s in enumerate(_middle(bursts).whole_s)))
            for name, bursts in both
        ),
    )
    notes = (
        f"{rounds_words(len(batch_first))}, the settings in turn; each a service of one colocated "
        f"worker with {num_threads} thread{'s' * (num_threads > 1)}, through its router and gRPC. "
        f"{NUM_REQUESTS} prompts of "
        f"{PROMPT_TOKENS} tokens at once, answers of {ANSWER_TOKENS}.",
        "A large batch makes every step longer for all who are in it, and they end together; a "
        "small one serves some at once while others wait. Which is earlier for the median depends "
        "on how much a larger batch gains: the less it gains, the more it delays.",
    )
    return Outcome(checks(batch_first, latency_first), Table(head, rows), chart, notes)


def _middle(bursts: list[Burst]) -> Burst:
    return sorted(bursts, key=lambda burst: burst.median_whole_s)[(len(bursts) - 1) // 2]
