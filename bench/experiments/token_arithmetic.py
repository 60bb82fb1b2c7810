"""TokenArithmetic: claim 8, a decode step is its weights' bytes over the memory's bandwidth."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import Axis, LineChart, Series, Style
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, number
from legato.plan.model_cost import ModelCost
from legato.plan.step_times import RooflineTimes

if TYPE_CHECKING:
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.bench.limits import Limits

BATCHES = (1, 2, 4, 8, 16)
CONTEXT_TOKENS = 64
NUM_STEPS = 8
MAX_ROUNDS = 7
# A step may take so many times what the formula says; less than it, only by noise.
LEAST, MOST = 0.9, 1.5
FORMULA_BATCH = 8
# The example: 7 billion weights of 2 bytes, memory of 2 TB/s.
EXAMPLE = ModelCost(
    weight_bytes=14 * 10**9,
    kv_bytes_per_token=0,
    layer_weights=7 * 10**9,
    head_weights=0,
    attention_width=0,
)
EXAMPLE_BYTES_PER_S = 2e12
EXAMPLE_FLOPS_PER_S = 300e12
EXAMPLE_MS, EXAMPLE_TOKENS_PER_S = 7.0, 140.0
EXAMPLE_ERROR = 0.03


@dataclass(frozen=True)
class FormulaPoint:
    """A batch; seconds of each round, and what the formula says with the round's limits."""

    num_sequences: int
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    @property
    def ratio(self) -> Rounds:
        """Measured over predicted."""
        return Rounds.ratios(self.measured_s, self.predicted_s)


def example_s() -> float:
    """A decode step of the example, by the planner's formula, without overheads."""
    times = RooflineTimes(
        EXAMPLE,
        flops_per_s=EXAMPLE_FLOPS_PER_S,
        bytes_per_s=EXAMPLE_BYTES_PER_S,
        link_bytes_per_s=1.0,
    )
    return times.decode_s(1, 0)


def checks(step_s: float, alone: FormulaPoint, batch: FormulaPoint) -> tuple[Check, ...]:
    """`step_s`: the example's; in the order of `criteria`."""
    off = max(abs(step_s * 1000 / EXAMPLE_MS - 1), abs(1 / step_s / EXAMPLE_TOKENS_PER_S - 1))
    named = TokenArithmetic.criteria
    return (
        Check(
            named[0],
            f"{step_s * 1000:.2f} ms, {1 / step_s:.0f} tokens/s",
            Answer.YES if off <= EXAMPLE_ERROR else Answer.NO,
        ),
        Check(named[1], alone.ratio.words(), alone.ratio.within(LEAST, MOST)),
        Check(named[2], batch.ratio.words(), batch.ratio.within(LEAST, MOST)),
    )


class TokenArithmetic(Experiment):
    """The planner's `RooflineTimes` with measured limits, against measured steps."""

    number, name = 8, "token-arithmetic"
    claim = (
        "A token reads every weight once: 7 billion weights at 16 bits are 14 GB, at 2 TB/s "
        "7 ms or 140 tokens/s; the same formula gives this machine's decode."
    )
    criteria = (
        f"the planner's formula gives {EXAMPLE_MS:g} ms and {EXAMPLE_TOKENS_PER_S:g} tokens/s for "
        f"the example, within {100 * EXAMPLE_ERROR:g} %",
        f"a measured step of one sequence takes {LEAST:g} to {MOST:g} times what the same formula "
        "says with the measured limits",
        f"and so does a step of {FORMULA_BATCH} sequences",
    )

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """The limits are measured in each round."""
        passes, engine = lab.passes, lab.engine
        if not passes.has_room(FORMULA_BATCH, CONTEXT_TOKENS + NUM_STEPS):
            raise CannotMeasureError(
                f"{FORMULA_BATCH} sequences of {CONTEXT_TOKENS + NUM_STEPS} tokens do not fit the "
                "model's context or the KV memory"
            )
        batches = [n for n in BATCHES if passes.has_room(n, CONTEXT_TOKENS + NUM_STEPS)]
        for size in batches:
            if budget.is_over:
                raise CannotMeasureError("the time was over before a round could begin")
            passes.decode_s(size, CONTEXT_TOKENS, 2)
        measured: dict[int, list[float]] = {size: [] for size in batches}
        predicted: dict[int, list[float]] = {size: [] for size in batches}
        for _ in budget.rounds(MAX_ROUNDS):
            limits = lab.measure_limits()
            times = _formula(engine.cost, limits, engine.product_dtype)
            for size in batches:
                steps = passes.decode_s(size, CONTEXT_TOKENS, NUM_STEPS)
                measured[size].append(statistics.median(steps))
                rows = size * (CONTEXT_TOKENS + NUM_STEPS // 2)
                predicted[size].append(times.decode_s(size, rows))
        if not measured[1]:
            raise CannotMeasureError("the time was over before a round could begin")
        points = [
            FormulaPoint(size, tuple(measured[size]), tuple(predicted[size])) for size in batches
        ]
        return _outcome(points, engine.cost, lab.limits[-len(measured[1]) :])


def _formula(cost: ModelCost, limits: Limits, product_dtype: str) -> RooflineTimes:
    peak = limits.matmul_ops_per_s.get(product_dtype)
    return RooflineTimes(
        cost,
        flops_per_s=float("inf") if peak is None else peak.best,
        bytes_per_s=limits.read_bytes_per_s.best,
        link_bytes_per_s=1.0,
    )


def _outcome(points: list[FormulaPoint], cost: ModelCost, limits: list[Limits]) -> Outcome:
    rows = tuple(
        (
            str(p.num_sequences),
            number(statistics.median(p.predicted_s) * 1000),
            Rounds(p.measured_s).words("ms", 1000),
            p.ratio.words(),
            number(p.num_sequences / statistics.median(p.measured_s)),
        )
        for p in points
    )
    head = ("sequences", "formula, ms", "measured", "measured over formula", "tokens/s")
    width = Rounds(tuple(limit.read_bytes_per_s.best for limit in limits))
    alone, batch = points[0], next(p for p in points if p.num_sequences == FORMULA_BATCH)
    chart = LineChart(
        "A decode step: the planner's formula and what was measured",
        "Milliseconds of a decode step against the batch; the formula is the slower of reading "
        "weights and KV and of multiplying, at this machine's measured limits.",
        Axis(
            "sequences in the batch", log=True, ticks=tuple(float(p.num_sequences) for p in points)
        ),
        Axis("milliseconds of a step"),
        (
            Series(
                "measured",
                tuple((p.num_sequences, Rounds(p.measured_s).median * 1000) for p in points),
                spread=tuple(
                    (Rounds(p.measured_s).low * 1000, Rounds(p.measured_s).high * 1000)
                    for p in points
                ),
            ),
            Series(
                "formula",
                tuple((p.num_sequences, Rounds(p.predicted_s).median * 1000) for p in points),
                Style.LIMIT,
            ),
        ),
    )
    notes = (
        f"This model: {number(cost.weight_bytes / 1e6)} MB of weights a step; this memory: "
        f"{width.words('GB/s', 1e-9)}; so {number(cost.weight_bytes / width.median * 1000)} ms or "
        f"{number(width.median / cost.weight_bytes)} tokens/s for weights alone.",
        "The formula knows no overhead: norms, attention's arithmetic, sampling and the launch of "
        "each operation come on top, and weigh the more the smaller the model is. Below 1 a part "
        "of the weights came from the processor's cache, or the limits were measured in a worse "
        "moment.",
    )
    return Outcome(checks(example_s(), alone, batch), Table(head, rows), chart, notes)
