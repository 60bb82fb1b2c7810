"""Recomputation: claim 2, what an answer costs without the KV cache."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from legato.bench.experiments.chart import Axis, LineChart, Series, Style
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import (
    Rounds,
    check_at_least,
    check_at_most,
    number,
    rounds_words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.plan.model_cost import ModelCost

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
NUM_STEPS = 8  # of a decode point; a round takes the median
MAX_ROUNDS = 7
LEAST_LENGTHS = 3
QUADRATIC, LINEAR = 1.9, 1.1  # exponents of counted work: at least, at most
MIDDLE = 2.83  # of the time from half the answer to all of it: between 2, linear, and 4, quadratic
ATTENTION_GROWS = 1.02


@dataclass(frozen=True)
class RecomputedTimes:
    """Seconds of one token behind so many others, in each round; lengths ascend."""

    lengths: tuple[int, ...]
    with_cache: tuple[tuple[float, ...], ...]  # of each length, its rounds
    without: tuple[tuple[float, ...], ...]

    @property
    def num_rounds(self) -> int:
        """The same for all lengths."""
        return len(self.with_cache[0])

    def totals(self, times: tuple[tuple[float, ...], ...], num_tokens: int) -> list[float]:
        """Of each round: seconds of an answer of so many tokens, from a prompt of one. Between
        measured lengths a straight line.
        """
        behind = np.arange(1, num_tokens + 1)
        return [
            float(np.interp(behind, self.lengths, [t[turn] for t in times]).sum())
            for turn in range(self.num_rounds)
        ]


def matrix_work(cost: ModelCost, num_tokens: int, *, cached: bool) -> int:
    """Operations of projections and MLPs for an answer of so many tokens, from a prompt of one: by
    the tokens that go into its forwards.
    """
    forwards = num_tokens if cached else num_tokens * (num_tokens + 1) // 2
    return 2 * cost.layer_weights * forwards


def checks(measured: RecomputedTimes, cost: ModelCost) -> tuple[Check, ...]:
    """In the order of `criteria`."""
    most = measured.lengths[-1]
    grown = [
        math.log2(matrix_work(cost, most, cached=cached) / matrix_work(cost, half, cached=cached))
        for half in (most // 2,)
        for cached in (False, True)
    ]
    without = measured.totals(measured.without, most), measured.totals(measured.without, most // 2)
    with_cache = (
        measured.totals(measured.with_cache, most),
        measured.totals(measured.with_cache, most // 2),
    )
    counted = Answer.YES if grown[0] >= QUADRATIC and grown[1] <= LINEAR else Answer.NO
    named = Recomputation.criteria
    return (
        Check(named[0], f"exponents {grown[0]:.2f} and {grown[1]:.2f}", counted),
        check_at_least(named[1], Rounds.ratios(*without), MIDDLE),
        check_at_most(named[2], Rounds.ratios(*with_cache), MIDDLE),
        check_at_least(
            named[3],
            Rounds.ratios(measured.with_cache[-1], measured.with_cache[0]),
            ATTENTION_GROWS,
        ),
    )


class Recomputation(Experiment):
    """Without the cache a token is had by a prefill of its whole history."""

    number, name = 2, "recomputation"
    claim = (
        "Without the cache a token recomputes the whole history: projection and MLP work is "
        "quadratic against linear; attention still grows."
    )
    criteria = (
        "counted operations of projections and MLPs grow with the answer's length to the power of "
        f"at least {QUADRATIC} without the cache, and of at most {LINEAR} with it",
        f"an answer twice as long takes at least {MIDDLE:g} times the time without the cache, "
        "which is nearer to four times (quadratic) than to twice (linear)",
        f"and at most {MIDDLE:g} times with it, attention's growth included",
        "with the cache a step behind the longest history takes at least "
        f"{ATTENTION_GROWS} times one behind the shortest: attention reads more",
    )

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Both in turn at each length, round after round."""
        passes = lab.passes
        usable = [n for n in LENGTHS if passes.has_room(1, n + NUM_STEPS)]

        def warm_up(length: int) -> None:
            passes.prefill_s(length)
            passes.decode_s(1, length, 2)

        lengths = budget.fitting(usable, warm_up, LEAST_LENGTHS)
        if len(lengths) < LEAST_LENGTHS:
            raise CannotMeasureError(
                f"{LEAST_LENGTHS} lengths are needed, {len(lengths)} could be measured in "
                f"the time and the room of {passes.max_rows:,} tokens"
            )
        times: dict[tuple[int, bool], list[float]] = {
            (n, cached): [] for n in lengths for cached in (False, True)
        }
        for _ in budget.rounds(MAX_ROUNDS):
            for length in lengths:
                times[length, False].append(passes.prefill_s(length))
                steps = passes.decode_s(1, length, NUM_STEPS)
                times[length, True].append(statistics.median(steps))
        if not times[lengths[0], True]:
            raise CannotMeasureError("the time was over before a round could begin")
        measured = RecomputedTimes(
            tuple(lengths),
            *(tuple(tuple(times[n, cached]) for n in lengths) for cached in (True, False)),
        )
        return _outcome(measured, lab.engine.cost, usable[len(lengths) :])


def _outcome(measured: RecomputedTimes, cost: ModelCost, left_out: Sequence[int]) -> Outcome:
    def medians(times: tuple[tuple[float, ...], ...]) -> Callable[[int], float]:
        return lambda n: statistics.median(measured.totals(times, n))

    without_s, with_s = medians(measured.without), medians(measured.with_cache)
    rows = tuple(
        (
            f"{n:,}",
            number(statistics.median(without) * 1000),
            number(statistics.median(cached) * 1000),
            number(without_s(n)),
            number(with_s(n)),
            number(matrix_work(cost, n, cached=False) / 1e9),
            number(matrix_work(cost, n, cached=True) / 1e9),
            number(2 * cost.attention_width * n * (n + 1) / 1e9),
        )
        for n, without, cached in zip(
            measured.lengths, measured.without, measured.with_cache, strict=True
        )
    )
    head: tuple[str, ...] = (
        "tokens",
        "a token without, ms",
        "with, ms",
        "all so far without, s",
        "with, s",
    )
    head += ("projections and MLPs without, Gop", "with, Gop", "attention with, Gop")
    chart = LineChart(
        "An answer without and with the KV cache",
        f"An answer of {measured.lengths[-1]:,} tokens takes "
        f"{number(without_s(measured.lengths[-1]))} s without the cache and "
        f"{number(with_s(measured.lengths[-1]))} s with it; a dashed line grows with the square.",
        Axis("tokens of the answer", log=True, ticks=tuple(map(float, measured.lengths))),
        Axis("seconds in all", log=True),
        (
            Series("without the cache", tuple((n, without_s(n)) for n in measured.lengths)),
            Series("with the cache", tuple((n, with_s(n)) for n in measured.lengths)),
            Series(
                "the square, through the last point",
                tuple(
                    (n, without_s(measured.lengths[-1]) * (n / measured.lengths[-1]) ** 2)
                    for n in measured.lengths[len(measured.lengths) // 2 :]
                ),
                Style.LIMIT,
            ),
        ),
    )
    notes = [
        "Without the cache a token is computed by a prefill of all tokens before it; its time is "
        f"measured at {len(measured.lengths)} lengths, {rounds_words(measured.num_rounds)}, with "
        "straight lines between them, and summed up.",
        "Short histories are cheaper than the square says: a forward reads every weight however "
        "few tokens it has.",
    ]
    if left_out:
        notes.append(f"Left out for want of time: {', '.join(f'{n:,}' for n in left_out)} tokens.")
    return Outcome(checks(measured, cost), Table(head, rows), chart, tuple(notes))
