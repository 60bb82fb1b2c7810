"""Roofline: claim 3, which limit of the machine prefill and decode are up against."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import Axis, LineChart, Series, Style
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, check_at_least, number, rounds_words

if TYPE_CHECKING:
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.plan.model_cost import ModelCost

PROMPTS = (16, 64, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXT_TOKENS = 64
NUM_STEPS = 8
MAX_ROUNDS = 5
SHARE = 0.5  # of the limit that is to be reached


@dataclass(frozen=True)
class RoofPoint:
    """One size of prefill (tokens) or decode (sequences), with what each round measured."""

    size: int
    is_decode: bool
    ops: float
    num_bytes: float
    seconds: tuple[float, ...]
    peak_ops_per_s: tuple[float, ...]  # measured in the same round; () where it cannot be
    bytes_per_s: tuple[float, ...]  # that memory gives, of the same round

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read."""
        return self.ops / self.num_bytes

    @property
    def of_peak(self) -> Rounds:
        """Share of the matrix products' peak, of each round."""
        if not self.peak_ops_per_s:
            return Rounds(())
        return Rounds.ratios([self.ops / s for s in self.seconds], self.peak_ops_per_s)

    @property
    def of_bandwidth(self) -> Rounds:
        """Share of the memory's bandwidth, of each round."""
        return Rounds.ratios([self.num_bytes / s for s in self.seconds], self.bytes_per_s)


def checks(prompt: RoofPoint, alone: RoofPoint) -> tuple[Check, ...]:
    """Of the longest prompt, and of decode of one sequence; in the order of `criteria`."""
    named = Roofline.criteria
    bandwidth = check_at_least(named[2], alone.of_bandwidth, SHARE)
    if not prompt.peak_ops_per_s:
        words = "no matrix product of this kind can be measured"
        unknown = [Check(statement, words, Answer.UNCLEAR) for statement in named]
        return (unknown[0], unknown[1], bandwidth, unknown[3])
    of_prompt = Rounds.ratios(prompt.of_peak.values, prompt.of_bandwidth.values)
    of_decode = Rounds.ratios(alone.of_bandwidth.values, alone.of_peak.values)
    return (
        check_at_least(named[0], prompt.of_peak, SHARE),
        check_at_least(named[1], of_prompt, 1.0),
        bandwidth,
        check_at_least(named[3], of_decode, 1.0),
    )


class Roofline(Experiment):
    """Operations and bytes by arithmetic over measured times, beside limits of the same round."""

    number, name = 3, "roofline"
    claim = "Prefill is compute-bound, decode is bound by memory bandwidth."
    criteria = (
        f"the longest prompt reaches at least {SHARE:g} of the measured peak of matrix products",
        "and is nearer to it than to the measured bandwidth (ratio at least 1)",
        f"decode of one sequence reaches at least {SHARE:g} of the measured memory bandwidth",
        "and is nearer to it than to the peak of matrix products (ratio at least 1)",
    )
    weight = 1.2

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """The limits are measured in each round, in the midst of the points."""
        passes = lab.passes

        def prefill(size: int) -> None:
            passes.prefill_s(size)

        def decode(size: int) -> None:
            passes.decode_s(size, CONTEXT_TOKENS, 2)

        prompts = [n for n in PROMPTS if passes.has_room(1, n)]
        prompts = budget.part(0.6).fitting(prompts, prefill, least=2)
        batches = [n for n in BATCHES if passes.has_room(n, CONTEXT_TOKENS + NUM_STEPS)]
        batches = budget.part(0.5).fitting(batches, decode, least=1)
        times: dict[tuple[int, bool], list[float]] = {
            **{(n, False): [] for n in prompts},
            **{(n, True): [] for n in batches},
        }
        peaks, widths = [], []
        for _ in budget.rounds(MAX_ROUNDS):
            for n in prompts:
                times[n, False].append(passes.prefill_s(n))
            limits = lab.measure_limits()
            peak = lab.peak(limits)
            peaks += [] if peak is None else [peak.best]
            widths.append(limits.read_bytes_per_s.best)
            for n in batches:
                steps = passes.decode_s(n, CONTEXT_TOKENS, NUM_STEPS)
                times[n, True].append(statistics.median(steps))
        if not widths or not prompts or not batches:
            raise CannotMeasureError("the time was over before a round could begin")
        cost = lab.engine.cost
        points = [
            RoofPoint(
                size,
                is_decode,
                *_work(cost, size, is_decode=is_decode),
                tuple(seconds),
                tuple(peaks),
                tuple(widths),
            )
            for (size, is_decode), seconds in times.items()
        ]
        return _outcome(points, len(widths), lab.engine.product_dtype)


def _work(cost: ModelCost, size: int, *, is_decode: bool) -> tuple[float, float]:
    """(operations, bytes) that it cannot do without."""
    if is_decode:
        rows = CONTEXT_TOKENS + NUM_STEPS // 2
        return cost.decode_ops(size, size * rows), cost.decode_bytes([rows] * size)
    return cost.prefill_ops(0, size), cost.decode_bytes([size])


def _outcome(points: list[RoofPoint], num_rounds: int, product_dtype: str) -> Outcome:
    prompts = [p for p in points if not p.is_decode]
    decode = [p for p in points if p.is_decode]
    rows = tuple(
        (
            f"decode of {p.size}" if p.is_decode else f"prefill of {p.size:,}",
            number(statistics.median(p.seconds) * 1000),
            number(p.intensity),
            number(p.ops / statistics.median(p.seconds) / 1e9),
            number(p.num_bytes / statistics.median(p.seconds) / 1e9),
            p.of_peak.words("%", 100) if p.of_peak.values else "not measured",
            p.of_bandwidth.words("%", 100),
        )
        for p in points
    )
    head = ("pass", "ms", "operations a byte", "Gop/s", "GB/s", "of the peak", "of the bandwidth")
    notes = [
        f"{rounds_words(num_rounds)}; peak ({product_dtype} products of 2,048 × 2,048) and "
        "bandwidth are measured in each, and a round's shares are of its own limits.",
        "Bytes are every weight once and the KV of the batch; operations are those of the matrices "
        "and of attention. What a pass reads or computes beyond that counts as lost.",
    ]
    above = [
        p.size for p in decode if p.of_peak.values and p.of_peak.median > p.of_bandwidth.median
    ]
    if above:
        notes.append(
            f"From a batch of {min(above)} on decode too is nearer to the peak of products than to "
            "the bandwidth: a batch moves decode to the right under the roof."
        )
    return Outcome(checks(prompts[-1], decode[0]), Table(head, rows), _chart(points), tuple(notes))


def _chart(points: list[RoofPoint]) -> LineChart:
    def places(*, is_decode: bool) -> tuple[tuple[float, float], ...]:
        return tuple(
            (p.intensity, p.ops / statistics.median(p.seconds) / 1e9)
            for p in points
            if p.is_decode == is_decode
        )

    most_prefill, most_decode = (
        number(max(y for _, y in places(is_decode=which))) for which in (False, True)
    )
    width = statistics.median(points[0].bytes_per_s) / 1e9
    least = min(p.intensity for p in points) / 1.5
    most = max(p.intensity for p in points) * 1.5
    roof: tuple[tuple[float, float], ...] = ((least, least * width), (most, most * width))
    if points[0].peak_ops_per_s:
        peak = statistics.median(points[0].peak_ops_per_s) / 1e9
        ridge = min(max(peak / width, least), most)
        roof = ((least, min(peak, least * width)), (ridge, peak), (most, peak))
    return LineChart(
        "Roofline: what prefill and decode reach of what the machine can do",
        f"Operations per second over operations per byte. Prefill reaches up to {most_prefill} "
        f"Gop/s, decode up to {most_decode}, below a slope of {number(width)} GB/s, which is "
        "memory's limit, and a flat part, which is the limit of matrix products.",
        Axis("operations for each byte read", log=True),
        Axis("Gop/s", log=True),
        (
            Series("prefill", places(is_decode=False), Style.DOTS),
            Series("decode", places(is_decode=True), Style.DOTS),
            Series("measured limits", roof, Style.LIMIT),
        ),
    )
