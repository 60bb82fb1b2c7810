"""Interference: claim 10, running streams while long prompts arrive, apart and colocated."""

from __future__ import annotations

import asyncio
import statistics
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import BarChart
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Check, Outcome, Table
from legato.bench.experiments.interference_run import (
    MIX_ANSWER_TOKENS,
    MIX_AT_ONCE,
    MIX_TOKENS,
    NUM_STREAMS,
    PERIOD_S,
    STREAM_PROMPT_TOKENS,
    Arrangement,
    InterferenceRun,
    Sizes,
    Turn,
)
from legato.bench.experiments.rounds import Rounds, check_at_most, number, rounds_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget

LONG_TOKENS = 1024
HALF, EVEN = 0.5, 1.5


def checks(apart: Sequence[Turn], colocated: Sequence[Sequence[Turn]]) -> tuple[Check, ...]:
    """Against the best colocated arrangement of the same round."""
    best = [min(turn.busy_p99_s for turn in turns) for turns in zip(*colocated, strict=True)]
    named = Interference.criteria
    busy = [turn.busy_p99_s for turn in apart]
    return (
        check_at_most(named[0], Rounds.ratios(busy, best), HALF),
        check_at_most(named[1], Rounds.ratios(busy, [t.quiet_p99_s for t in apart]), EVEN),
    )


def throughput_words(apart: Sequence[Turn], colocated: dict[str, Sequence[Turn]]) -> str:
    """Who has more tokens/s in all; no check, as the claim does not promise it."""
    own = statistics.median(turn.tokens_per_s for turn in apart)
    name, turns = max(
        colocated.items(), key=lambda item: statistics.median(t.tokens_per_s for t in item[1])
    )
    other = statistics.median(turn.tokens_per_s for turn in turns)
    if other > own:
        return (
            f"For total throughput colocated wins here: {name} makes {number(other / own)} times "
            "the tokens/s of prefill and decode apart. A core that only computes prompts, or only "
            "decodes, has to wait when the load has less of its kind."
        )
    return (
        f"For total throughput apart is not behind here: {number(own / other)} times the tokens/s "
        f"of the best colocated arrangement ({name})."
    )


class Interference(Experiment):
    """The same cores in three arrangements of workers."""

    number, name = 10, "interference"
    claim = (
        "Prefill and decode apart keep running streams even while long prompts arrive, on the same "
        "resources as colocated ones; in total throughput colocated may win."
    )
    criteria = (
        f"while long prompts arrive the streams' ITL p99 is at most {HALF:g} of that of the best "
        "colocated arrangement",
        f"and at most {EVEN:g} times what it is when nothing arrives",
    )
    weight = 4.0

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Worker processes of their own; the lab's model is given back before."""
        cores = lab.settings.num_threads
        if cores < 2:
            raise CannotMeasureError(
                f"{cores} core is to be used: a worker for prefill and one for decode need two"
            )
        config = lab.engine.model.config
        long_tokens = min(LONG_TOKENS, config.context_length // 2)
        stream_tokens = min(1024, config.context_length - STREAM_PROMPT_TOKENS)
        if long_tokens < MIX_TOKENS + MIX_ANSWER_TOKENS:
            raise CannotMeasureError(
                f"prompts of {MIX_TOKENS + MIX_ANSWER_TOKENS} tokens and twice the context are "
                f"needed, limit {config.context_length}: the model's context"
            )
        on_gpu = lab.engine.device.type == "cuda"
        lab.check_room(5)
        lab.release()
        half = cores // 2
        arrangements = (
            Arrangement("apart (1P1D)", ("prefill", "decode"), half),
            Arrangement("two colocated", ("colocated", "colocated"), half),
            Arrangement("one colocated", ("colocated",), 2 * half),
        )
        run = InterferenceRun(
            lab.settings, long_tokens, stream_tokens, Sizes.within(budget.seconds)
        )
        turns = asyncio.run(run.measure(arrangements, budget))
        if not turns[arrangements[0]]:
            raise CannotMeasureError("the time was over before a round could begin")
        return _outcome(turns, run, on_gpu=on_gpu)


def _outcome(
    turns: dict[Arrangement, list[Turn]], run: InterferenceRun, *, on_gpu: bool
) -> Outcome:
    (apart, apart_turns), *others = turns.items()

    def cell(found: Sequence[Turn], field: str, factor: float = 1.0) -> str:
        return Rounds(tuple(getattr(turn, field) for turn in found)).words("", factor)

    rows = tuple(
        (
            f"{one.name}, {one.cores_each} thread{'s' * (one.cores_each > 1)} each",
            cell(found, "quiet_p99_s", 1000),
            cell(found, "busy_p99_s", 1000),
            cell(found, "busy_worst_s", 1000),
            cell(found, "prompt_ttft_s"),
            cell(found, "tokens_per_s"),
        )
        for one, found in turns.items()
    )
    head: tuple[str, ...] = ("workers", "ITL p99 quiet, ms", "under prompts, ms", "worst gap, ms")
    head += ("prompts' TTFT, s", "mixed load, tokens/s")

    def medians(field: str) -> tuple[float, ...]:
        return tuple(
            round(1000 * statistics.median(getattr(t, field) for t in found))
            for found in turns.values()
        )

    chart = BarChart(
        "ITL p99 of running streams, quiet and while long prompts arrive",
        "; ".join(
            f"{one.name}: {quiet} ms quiet, {busy} ms while prompts arrive"
            for one, quiet, busy in zip(
                turns, medians("quiet_p99_s"), medians("busy_p99_s"), strict=True
            )
        ),
        "ITL p99, ms",
        tuple(one.name for one in turns),
        (
            ("quiet", medians("quiet_p99_s")),
            ("long prompts arrive", medians("busy_p99_s")),
        ),
    )
    cores = apart.cores_each * len(apart.roles)
    notes = [
        throughput_words(apart_turns, {one.name: found for one, found in others}),
        f"{rounds_words(len(apart_turns))}, the arrangements in turn, each on {cores} cores in "
        "all; router and client share them. "
        f"{NUM_STREAMS} streams decode; a prompt of {run.long_tokens:,} tokens arrives every "
        f"{PERIOD_S:g} s, {run.sizes.num_prompts} of them. Mixed load: {run.sizes.num_mixed} "
        f"requests of {MIX_TOKENS} tokens in, {MIX_ANSWER_TOKENS} out, {MIX_AT_ONCE} at once.",
    ]
    if on_gpu:
        notes.append("All workers share one GPU: apart does not give each a GPU of its own.")
    return Outcome(
        checks(apart_turns, [found for _, found in others]), Table(head, rows), chart, tuple(notes)
    )
