"""BatchSizes: decode tokens/s against the requests offered, until the pool is full and beyond."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.decode_curve.trace import alike
from legato.bench.limits import measure_limits
from legato.worker.kv.block_pool import blocks_for
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.bench.decode_curve.capacity_engine import CapacityEngine
    from legato.bench.decode_curve.capacity_run import RunRecord
    from legato.bench.limits import Limits

# Everybody's room is promised to the end. `expected` would let in a few more while those before
# them are about to end, and the batch would not be what arithmetic says.
_RULE = AdmissionRule(AdmissionMode.RESERVE)
_WARM_UP_STEPS = 2  # enough to compile the step of each batch size


@dataclass(frozen=True)
class Bend:
    """Where the curve must end, by arithmetic: what the pool holds over what a sequence takes."""

    pool_blocks: int
    pool_tokens: int
    sequence_tokens: int  # rows of KV at its end
    sequence_blocks: int
    batch_size: int  # whole sequences that fit

    @classmethod
    def of(cls, num_blocks: int, block_size: int, sequence_tokens: int) -> Bend:
        """For sequences of one length."""
        sequence_blocks = blocks_for(sequence_tokens, block_size)
        return cls(
            pool_blocks=num_blocks,
            pool_tokens=num_blocks * block_size,
            sequence_tokens=sequence_tokens,
            sequence_blocks=sequence_blocks,
            batch_size=num_blocks // sequence_blocks,
        )


@dataclass(frozen=True)
class Turn:
    """One batch size in one round."""

    offered: int  # requests under way or waiting, all the time
    mean_batch: float  # sequences in a step
    tokens_per_s: float  # of decode alone
    held_blocks: int  # at most
    # What the machine could do at most, by limits measured right after it:
    bandwidth_tokens_per_s: float  # reading the weights once a step, and the KV of all
    product_tokens_per_s: float | None  # multiplying; None where there is no such limit
    limits: Limits


@dataclass(frozen=True)
class Point:
    """One batch size: medians over the rounds, and the range of its rate."""

    offered: int
    mean_batch: float
    tokens_per_s: float
    tokens_per_s_lowest: float
    tokens_per_s_highest: float
    pool_held: float  # at most, of all blocks
    bandwidth_tokens_per_s: float
    product_tokens_per_s: float | None
    of_bandwidth: float  # of each turn's own limit
    rounds: int

    @classmethod
    def of(cls, turns: SequenceOf[Turn], bend: Bend) -> Point:
        """All of the same batch size."""
        rates = [turn.tokens_per_s for turn in turns]
        products = [t.product_tokens_per_s for t in turns if t.product_tokens_per_s is not None]
        return cls(
            offered=turns[0].offered,
            mean_batch=statistics.median(turn.mean_batch for turn in turns),
            tokens_per_s=statistics.median(rates),
            tokens_per_s_lowest=min(rates),
            tokens_per_s_highest=max(rates),
            pool_held=max(turn.held_blocks for turn in turns) / bend.pool_blocks,
            bandwidth_tokens_per_s=statistics.median(t.bandwidth_tokens_per_s for t in turns),
            product_tokens_per_s=statistics.median(products) if products else None,
            of_bandwidth=statistics.median(
                t.tokens_per_s / t.bandwidth_tokens_per_s for t in turns
            ),
            rounds=len(turns),
        )


def batch_sizes(bend: Bend) -> list[int]:
    """Powers of two, none just below the bend; the bend itself; and beyond it what does not fit."""
    sizes, size = [], 1
    while size <= bend.batch_size * 4 // 5:
        sizes.append(size)
        size *= 2
    return [*sizes, bend.batch_size, *(-(-bend.batch_size * n // 2) for n in (3, 4))]


@dataclass(frozen=True)
class BatchSizes:
    """What is measured. Prompts and answers are all of one length, to the last token."""

    prompt_tokens: int = 64
    max_tokens: int = 65
    num_rounds: int = 3
    num_steps: int = 96  # of a turn: one and a half answers, whose first tokens prefill gives

    def bend(self, engine: CapacityEngine) -> Bend:
        """Of the engine's pool.

        Raises:
            ValueError: the pool or the batch is too small for a curve.
        """
        tokens = self.prompt_tokens + self.max_tokens - 1
        bend = Bend.of(engine.cache.num_blocks, engine.cache.shape.block_size, tokens)
        if bend.batch_size < 2:
            raise ValueError(
                f"the KV pool has {bend.pool_blocks} blocks; a sequence of {tokens} tokens takes "
                f"{bend.sequence_blocks}, and there must be room for two"
            )
        if bend.batch_size > engine.max_batch_size:
            raise ValueError(
                f"{bend.batch_size} sequences fit the KV pool, limit {engine.max_batch_size}: "
                "max_batch_size; give less KV memory"
            )
        return bend

    def measure(
        self,
        engine: CapacityEngine,
        num_threads: int,
        on_turn: Callable[[int, Turn], None],
    ) -> list[Point]:
        """Round after round over all sizes, so that a slow minute of the machine hits them all.

        `on_turn`: called with the number of the round.
        """
        bend = self.bend(engine)
        sizes = batch_sizes(bend)
        for size in sizes:
            self._run(engine, size, _WARM_UP_STEPS)
        turns: list[Turn] = []
        for number in range(self.num_rounds):
            for size in sizes:
                record = self._run(engine, size, self.num_steps)
                limits = measure_limits(num_threads, engine.device, num_tries=3)
                turns.append(_turn(engine, size, record, limits))
                on_turn(number, turns[-1])
        return [Point.of([t for t in turns if t.offered == size], bend) for size in sizes]

    def _run(self, engine: CapacityEngine, size: int, num_steps: int) -> RunRecord:
        generations = 2 + num_steps // max(1, self.max_tokens - 1)
        requests = alike(
            size * generations, self.prompt_tokens, self.max_tokens, engine.model.config.vocab_size
        )
        return engine.run(requests, _RULE, num_at_once=size, num_steps=num_steps)


def _turn(engine: CapacityEngine, size: int, record: RunRecord, limits: Limits) -> Turn:
    steps = record.steps
    num_tokens = sum(step.num_sequences for step in steps)
    num_bytes = sum(step.decode_bytes for step in steps)
    product = limits.matmul_ops_per_s.get(engine.product_dtype)
    num_ops = num_tokens * engine.cost.prefill_ops(0, 1)  # attention left out
    return Turn(
        offered=size,
        mean_batch=num_tokens / len(steps),
        tokens_per_s=num_tokens / sum(step.seconds for step in steps),
        held_blocks=max(step.held_blocks for step in steps),
        bandwidth_tokens_per_s=num_tokens * limits.read_bytes_per_s.best / num_bytes,
        product_tokens_per_s=num_tokens * product.best / num_ops if product else None,
        limits=limits,
    )
