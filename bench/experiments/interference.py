"""Interference: claim 10, running streams while long prompts arrive, apart and colocated."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import BarChart
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, check_at_most, number
from legato.bench.experiments.timed_service import timed_service
from legato.bench.workload import percentile
from legato.cluster.text.model_text import ModelText
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.bench.experiments.timed_service import TimedService
    from legato.cluster.control_plane import Role

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 16
LONG_TOKENS = 1024
PERIOD_S = 2.0
MAX_ROUNDS = 5
TURN_TIMEOUT_S = 180.0
MIX_TOKENS, MIX_ANSWER_TOKENS, MIX_AT_ONCE = 256, 64, 8
HALF, EVEN = 0.5, 1.5


@dataclass(frozen=True)
class Arrangement:
    """The same cores, divided among workers."""

    name: str
    roles: tuple[Role, ...]
    cores_each: int


@dataclass(frozen=True)
class Sizes:
    """Of one turn, by the time that there is."""

    quiet_s: float
    num_prompts: int
    num_mixed: int

    @classmethod
    def within(cls, seconds: float) -> Sizes:
        """A turn of each arrangement is to take about a third of this, and less where it can."""
        turn_s = seconds / 6
        return cls(
            quiet_s=min(4.0, max(1.0, turn_s / 6)),
            num_prompts=int(min(5, max(2, turn_s // 5))),
            num_mixed=int(min(16, max(MIX_AT_ONCE, turn_s // 2))),
        )


@dataclass(frozen=True)
class Turn:
    """One arrangement in one round."""

    quiet_p99_s: float  # gaps of the streams while nothing arrives
    busy_p99_s: float  # while long prompts arrive
    busy_worst_s: float
    prompt_ttft_s: float  # the median of the long prompts
    tokens_per_s: float  # of another load, for throughput: answers' tokens over all its time


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
            "decodes, idles when the mix has less of its kind."
        )
    return (
        f"For total throughput apart is not behind here: {number(own / other)} times the tokens/s "
        f"of the best colocated arrangement ({name})."
    )


class Interference(Experiment):
    """Services of all arrangements stay up and take turns, the others idle."""

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
        run = _Run(lab, long_tokens, stream_tokens, Sizes.within(budget.seconds))
        turns = asyncio.run(run.measure(arrangements, budget))
        if not turns[arrangements[0]]:
            raise CannotMeasureError("the time was over before a round could begin")
        return _outcome(turns, run, on_gpu=on_gpu)


class _Run:
    def __init__(self, lab: Lab, long_tokens: int, stream_tokens: int, sizes: Sizes) -> None:
        self._lab = lab
        self.long_tokens, self._stream_tokens, self.sizes = long_tokens, stream_tokens, sizes

    async def measure(
        self, arrangements: Sequence[Arrangement], budget: TimeBudget
    ) -> dict[Arrangement, list[Turn]]:
        text = ModelText.load(resolve_model(self._lab.settings.model))
        turns: dict[Arrangement, list[Turn]] = {one: [] for one in arrangements}
        async with AsyncExitStack() as stack:
            with budget.apart():
                services = {
                    one: await stack.enter_async_context(
                        timed_service(self._lab.settings, text, one.roles, one.cores_each)
                    )
                    for one in arrangements
                }
            for _ in budget.rounds(MAX_ROUNDS):
                for one, service in services.items():
                    async with asyncio.timeout(TURN_TIMEOUT_S):
                        turns[one].append(await self._turn(service))
        return turns

    async def _turn(self, service: TimedService) -> Turn:
        lanes: list[list[list[float]]] = [[] for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(self._stream(service, lane)) for lane in lanes]
        try:
            await _until_all_stream(lanes, streams)
            begun_s = time.perf_counter()
            await asyncio.sleep(self.sizes.quiet_s)
            quiet_until_s = time.perf_counter()
            ttfts = await self._prompts(service)
            busy_until_s = time.perf_counter()
            for task in streams:
                if task.done():
                    task.result()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        quiet = _gaps(lanes, begun_s, quiet_until_s)
        busy = _gaps(lanes, quiet_until_s, busy_until_s)
        if not quiet or not busy:
            raise RuntimeError("the streams had no tokens while they were watched")
        mixed_s = time.perf_counter()
        answers = await service.answers(
            self.sizes.num_mixed, MIX_TOKENS, MIX_ANSWER_TOKENS, MIX_AT_ONCE
        )
        mixed_s = time.perf_counter() - mixed_s
        return Turn(
            percentile(quiet, 99),
            percentile(busy, 99),
            max(busy),
            statistics.median(ttfts),
            sum(len(answer.token_times_s) for answer in answers) / mixed_s,
        )

    async def _stream(self, service: TimedService, answers: list[list[float]]) -> None:
        """One answer after the other, until it is cancelled."""
        while True:
            answers.append([])
            await service.answer(STREAM_PROMPT_TOKENS, self._stream_tokens, answers[-1])

    async def _prompts(self, service: TimedService) -> list[float]:
        """Long ones, one a period, whatever became of those before; their TTFT."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(self.sizes.num_prompts):
                tasks.append(group.create_task(service.answer(self.long_tokens, 1)))
                await asyncio.sleep(PERIOD_S)
        return [task.result().ttft_s for task in tasks]


async def _until_all_stream(
    lanes: list[list[list[float]]], streams: list[asyncio.Task[None]]
) -> None:
    """Until each has some tokens. Raises RuntimeError where one failed."""
    while not all(lane and len(lane[0]) >= 3 for lane in lanes):
        for task in streams:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


def _gaps(lanes: list[list[list[float]]], begun_s: float, until_s: float) -> list[float]:
    """Those that ended in between, within an answer."""
    return [
        b - a
        for lane in lanes
        for times in lane
        for a, b in pairwise(times)
        if begun_s < b <= until_s
    ]


def _outcome(turns: dict[Arrangement, list[Turn]], run: _Run, *, on_gpu: bool) -> Outcome:
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
        f"Milliseconds for {', '.join(one.name for one in turns)}, on the same cores.",
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
        f"{len(apart_turns)} rounds, the arrangements in turn, each on {cores} cores in all; "
        "router and client share them. "
        f"{NUM_STREAMS} streams decode; a prompt of {run.long_tokens:,} tokens arrives every "
        f"{PERIOD_S:g} s, {run.sizes.num_prompts} of them. Mixed load: {run.sizes.num_mixed} "
        f"requests of {MIX_TOKENS} tokens in, {MIX_ANSWER_TOKENS} out, {MIX_AT_ONCE} at once.",
    ]
    if on_gpu:
        notes.append("All workers share one GPU: apart does not give each a GPU of its own.")
    return Outcome(
        checks(apart_turns, [found for _, found in others]), Table(head, rows), chart, tuple(notes)
    )
