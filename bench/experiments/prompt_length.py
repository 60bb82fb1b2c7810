"""PromptLength: claim 4, what a longer prompt does to the first token and to those behind it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import Axis, LineChart, Series
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import (
    Rounds,
    all_of,
    check_at_least,
    check_at_most,
    number,
    rounds_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
NUM_STEPS = 8  # behind each prompt; a round takes the median
MAX_ROUNDS = 7
LEAST_LENGTHS = 3
TTFT_SHARE = 0.25  # of the prompt's own growth
FLAT = 1.5


@dataclass(frozen=True)
class PromptTimes:
    """Seconds in each round; lengths ascend."""

    lengths: tuple[int, ...]
    first_s: tuple[tuple[float, ...], ...]  # of each length, its rounds: TTFT
    token_s: tuple[tuple[float, ...], ...]  # each token behind it


def checks(measured: PromptTimes) -> tuple[Check, ...]:
    """In the order of `criteria`."""
    steps = [Rounds.ratios(b, a).at_least(1.0) for a, b in pairwise(measured.first_s)]
    missed = [
        f"{length:,}"
        for length, step in zip(measured.lengths[1:], steps, strict=True)
        if step is not Answer.YES
    ]
    grown = measured.lengths[-1] / measured.lengths[0]
    ttft = Rounds.ratios(measured.first_s[-1], measured.first_s[0])
    token = Rounds.ratios(measured.token_s[-1], measured.token_s[0])
    named = PromptLength.criteria
    return (
        Check(
            named[0],
            f"not surely at {', '.join(missed)} tokens" if missed else "at every length",
            all_of(steps),
        ),
        Check(
            named[1],
            f"{ttft.words()}; the prompt grows {grown:g}-fold",
            ttft.at_least(TTFT_SHARE * grown),
        ),
        check_at_most(named[2], token, FLAT),
        check_at_least(named[3], Rounds.ratios(ttft.values, token.values), 2.0),
    )


class PromptLength(Experiment):
    """Prompts alone, each with some tokens behind it, on the bare engine: nothing queues."""

    number, name = 4, "prompt-length"
    claim = "TTFT grows with the prompt; the time per output token is roughly flat."
    criteria = (
        "TTFT is longer at every longer prompt",
        "from the shortest to the longest prompt TTFT grows by at least "
        f"{TTFT_SHARE:g} of what the prompt grows by",
        f"the time per output token grows by at most {FLAT:g} from the shortest prompt to the "
        "longest",
        "TTFT grows at least twice as much as the time per output token",
    )

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """All lengths in turn, round after round."""
        passes = lab.passes
        usable = [n for n in LENGTHS if passes.has_room(1, n + NUM_STEPS)]

        def warm_up(length: int) -> None:
            passes.answer_s(length, 2)

        lengths = budget.fitting(usable, warm_up, LEAST_LENGTHS)
        if len(lengths) < LEAST_LENGTHS:
            raise CannotMeasureError(
                f"{LEAST_LENGTHS} lengths are needed, {len(lengths)} could be measured in "
                f"the time and the room of {passes.max_rows:,} tokens"
            )
        first: dict[int, list[float]] = {n: [] for n in lengths}
        token: dict[int, list[float]] = {n: [] for n in lengths}
        for _ in budget.rounds(MAX_ROUNDS):
            for length in lengths:
                first_s, steps = passes.answer_s(length, NUM_STEPS)
                first[length].append(first_s)
                token[length].append(statistics.median(steps))
        if not first[lengths[0]]:
            raise CannotMeasureError("the time was over before a round could begin")
        measured = PromptTimes(
            tuple(lengths),
            tuple(tuple(first[n]) for n in lengths),
            tuple(tuple(token[n]) for n in lengths),
        )
        return _outcome(measured, usable[len(lengths) :])


def _outcome(measured: PromptTimes, left_out: Sequence[int]) -> Outcome:
    def series(name: str, times: tuple[tuple[float, ...], ...]) -> Series:
        rounds = [Rounds(t) for t in times]
        return Series(
            name,
            tuple((n, r.median * 1000) for n, r in zip(measured.lengths, rounds, strict=True)),
            spread=tuple((r.low * 1000, r.high * 1000) for r in rounds),
        )

    rows = tuple(
        (
            f"{n:,}",
            Rounds(first).words("ms", 1000),
            Rounds(token).words("ms", 1000),
            number(n / statistics.median(first)),
        )
        for n, first, token in zip(
            measured.lengths, measured.first_s, measured.token_s, strict=True
        )
    )
    notes = [
        f"{rounds_words(len(measured.first_s[0]))} over all lengths; {NUM_STEPS} tokens behind "
        "each prompt."
    ]
    if left_out:
        notes.append(f"Left out for want of time: {', '.join(f'{n:,}' for n in left_out)} tokens.")
    return Outcome(
        checks(measured),
        Table(("prompt, tokens", "TTFT", "each further token", "prompt tokens/s"), rows),
        LineChart(
            "TTFT and time per output token against the prompt's length",
            f"From {measured.lengths[0]} to {measured.lengths[-1]:,} tokens TTFT goes "
            f"{_from_to(measured.first_s)}, each further token {_from_to(measured.token_s)}.",
            Axis("tokens of the prompt", log=True, ticks=tuple(map(float, measured.lengths))),
            Axis("milliseconds", log=True),
            (series("TTFT", measured.first_s), series("each further token", measured.token_s)),
        ),
        tuple(notes),
    )


def _from_to(times: tuple[tuple[float, ...], ...]) -> str:
    first, last = (1000 * statistics.median(rounds) for rounds in (times[0], times[-1]))
    return f"from {number(first)} to {number(last)} ms"
