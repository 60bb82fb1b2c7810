"""BatchSize: claim 5, tokens/s against the batch, until the KV pool is full."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from legato.bench.decode_curve.batch_sizes import Bend, batch_sizes
from legato.bench.decode_curve.trace import alike
from legato.bench.experiments.chart import Axis, LineChart, Series, Style
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, all_of, check_at_most, number, rounds_words
from legato.worker.kv.block_pool import blocks_for
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule

if TYPE_CHECKING:
    from legato.bench.decode_curve.capacity_engine import CapacityEngine
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget

PROMPT_TOKENS, MAX_TOKENS = 64, 65
NUM_STEPS = 32
POOL_SEQUENCES = 24
MAX_ROUNDS = 5
DOUBLING = 1.6  # of tokens/s when the batch doubles
BATCH_ERROR = 0.05
BEYOND = 1.1
_RULE = AdmissionRule(AdmissionMode.RESERVE)  # everybody's room is promised to the end


@dataclass(frozen=True)
class BatchPoint:
    """So many requests under way or waiting all the time."""

    offered: int
    mean_batch: float
    tokens_per_s: tuple[float, ...]  # of each round


def checks(points: list[BatchPoint], bend: int) -> tuple[Check, ...]:
    """`bend`: sequences that the pool has room for, by arithmetic."""
    below = [p for p in points if p.offered <= bend]
    at_bend = next(p for p in points if p.offered == bend)
    beyond = [p for p in points if p.offered > bend]
    doublings = [
        (a, b, Rounds.ratios(b.tokens_per_s, a.tokens_per_s))
        for a, b in pairwise(below)
        if b.offered == 2 * a.offered
    ]
    named = BatchSize.criteria
    gains = ", ".join(
        f"{number(gained.median)} from {a.offered} to {b.offered}" for a, b, gained in doublings
    )
    batches = [p.mean_batch for p in (at_bend, *beyond)]
    far = max(abs(batch / bend - 1) for batch in batches)
    return (
        Check(
            named[0],
            gains or "no doubling below the bend",
            all_of([gained.at_least(DOUBLING) for _, _, gained in doublings]),
        ),
        Check(
            named[1],
            f"{' and '.join(f'{batch:.1f}' for batch in batches)}, predicted {bend}",
            Answer.YES if far <= BATCH_ERROR else Answer.NO,
        ),
        check_at_most(
            named[2],
            Rounds.ratios(beyond[-1].tokens_per_s, at_bend.tokens_per_s) if beyond else Rounds(()),
            BEYOND,
        ),
    )


class BatchSize(Experiment):
    """The product's scheduler and admission over a pool with room for few sequences."""

    number, name = 5, "batch-size"
    claim = "Throughput rises almost linearly with the batch until the KV cache is full."
    criteria = (
        f"each doubling of the batch below the bend gives at least {DOUBLING:g} times the tokens/s",
        "with as many requests as the pool has room for by arithmetic, and with more, the batch is "
        f"that number within {100 * BATCH_ERROR:g} %",
        f"twice as many requests as fit give at most {BEYOND:g} times the tokens/s of those that "
        "do",
    )
    weight = 1.6

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """All sizes in turn, round after round."""
        whole = lab.engine
        block_size, rows = whole.cache.shape.block_size, PROMPT_TOKENS + MAX_TOKENS - 1
        if rows + 1 > whole.model.config.context_length:
            raise CannotMeasureError(
                f"a sequence needs {rows + 1} tokens, limit {whole.model.config.context_length}: "
                "the model's context"
            )
        engine = whole.with_blocks(POOL_SEQUENCES * blocks_for(rows, block_size))
        bend = Bend.of(engine.cache.num_blocks, block_size, rows)
        assert bend.batch_size == POOL_SEQUENCES, "the pool is made for them"
        sizes = batch_sizes(bend)
        rates: dict[int, list[float]] = {size: [] for size in sizes}
        batches: dict[int, list[float]] = {size: [] for size in sizes}
        for size in sizes:
            if size > bend.batch_size:
                break  # no larger batch comes of it
            if budget.is_over:
                raise CannotMeasureError("the time was over before a round could begin")
            _run(engine, size, 2)
        for _ in budget.rounds(MAX_ROUNDS):
            for size in sizes:
                tokens_per_s, mean_batch = _run(engine, size, NUM_STEPS)
                rates[size].append(tokens_per_s)
                batches[size].append(mean_batch)
        if not rates[sizes[0]]:
            raise CannotMeasureError("the time was over before a round could begin")
        points = [
            BatchPoint(size, statistics.median(batches[size]), tuple(rates[size])) for size in sizes
        ]
        return _outcome(points, bend, _limits(lab, sizes, bend.batch_size))


def _run(engine: CapacityEngine, size: int, num_steps: int) -> tuple[float, float]:
    """(tokens/s of decode alone, sequences in a step)."""
    answers = 2 + num_steps // (MAX_TOKENS - 1)
    vocab_size = engine.model.config.vocab_size
    requests = alike(size * answers, PROMPT_TOKENS, MAX_TOKENS, vocab_size)
    steps = engine.run(requests, _RULE, num_at_once=size, num_steps=num_steps).steps
    num_tokens = sum(step.num_sequences for step in steps)
    return num_tokens / sum(step.seconds for step in steps), num_tokens / len(steps)


def _limits(lab: Lab, sizes: list[int], bend: int) -> list[tuple[float, float]]:
    """Of each number of requests (tokens/s by bandwidth, by products): of steps that do nothing but
    read weights and KV, or nothing but multiply.
    """
    limits, cost = lab.measure_limits(), lab.engine.cost
    peak = lab.peak(limits)
    rows = PROMPT_TOKENS + MAX_TOKENS // 2
    found = []
    for size in sizes:
        batch = min(size, bend)
        step_s = cost.decode_bytes([rows] * batch) / limits.read_bytes_per_s.best
        by_product = float("inf")
        if peak is not None:
            by_product = batch * peak.best / cost.decode_ops(batch, batch * rows)
        found.append((batch / step_s, by_product))
    return found


def _outcome(points: list[BatchPoint], bend: Bend, limits: list[tuple[float, float]]) -> Outcome:
    alone = statistics.median(points[0].tokens_per_s)
    rows = tuple(
        (
            str(p.offered),
            f"{p.mean_batch:.1f}",
            Rounds(p.tokens_per_s).words(),
            number(statistics.median(p.tokens_per_s) / alone),
            number(by_bytes),
            "not measured" if by_product == float("inf") else number(by_product),
        )
        for p, (by_bytes, by_product) in zip(points, limits, strict=True)
    )
    head: tuple[str, ...] = ("requests", "batch", "decode tokens/s", "of one alone")
    head += ("bandwidth's limit, tokens/s", "products' limit")
    rounds = [Rounds(p.tokens_per_s) for p in points]
    full = next(r for p, r in zip(points, rounds, strict=True) if p.offered == bend.batch_size)
    chart = LineChart(
        "Decode tokens/s against the requests at once",
        f"{number(rounds[0].median)} tokens per second of one alone, {number(full.median)} of "
        f"{bend.batch_size}, which fill the KV pool, {number(rounds[-1].median)} where "
        f"{points[-1].offered} are offered.",
        Axis("requests at once", log=True, ticks=tuple(float(p.offered) for p in points)),
        Axis("decode tokens/s"),
        (
            Series(
                "measured",
                tuple((p.offered, r.median) for p, r in zip(points, rounds, strict=True)),
                spread=tuple((r.low, r.high) for r in rounds),
            ),
            Series(
                "as many times one alone",
                tuple((p.offered, alone * p.offered) for p in points if p.offered <= 8),
                Style.LIMIT,
            ),
        ),
        (bend.batch_size, f"pool full: {bend.pool_blocks} // {bend.sequence_blocks}"),
    )
    notes = [
        f"Prompts of {PROMPT_TOKENS} and answers of {MAX_TOKENS} tokens: {bend.sequence_blocks} "
        f"blocks each, of {bend.pool_blocks}. {rounds_words(len(points[0].tokens_per_s))} of "
        f"{NUM_STEPS} steps at each number of requests; prefill is not timed."
    ]
    bound = [
        p.offered
        for p, (by_bytes, by_product) in zip(points, limits, strict=True)
        if by_product < by_bytes
    ]
    if bound and bound[0] <= bend.batch_size:
        notes.append(
            f"From {bound[0]} at once on the measured limit of matrix products is below that of "
            "the bandwidth: there a larger batch gives less by arithmetic too, before memory is "
            "full."
        )
    return Outcome(checks(points, bend.batch_size), Table(head, rows), chart, tuple(notes))
