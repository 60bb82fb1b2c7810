"""KvHeads: claim 6, what fewer KV heads than query heads save."""

from __future__ import annotations

import dataclasses
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from legato.bench.experiments.chart import BarChart
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Check, Outcome, Table
from legato.bench.experiments.rounds import Rounds, all_of, check_at_least, number
from legato.kernels import huge_pages
from legato.worker.kv.cache import KvCache

if TYPE_CHECKING:
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.worker.kv.cache import KvShape

POOL_BYTES = 64 << 20  # of the model's own shape
NUM_ROUNDS = 2  # bytes, not times: more would tell no more
SEVERAL = 2.0
ERROR = 0.1
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class KvBytes:
    """Bytes of KV of one token."""

    num_kv_heads: int
    predicted: int
    measured: tuple[float, ...]  # of each round


def checks(own: KvBytes, full: KvBytes) -> tuple[Check, ...]:
    """`full`: with a KV head for each query head."""
    saved = Rounds.ratios(full.measured, own.measured)
    named = KvHeads.criteria
    off = [Rounds(tuple(value / kv.predicted for value in kv.measured)) for kv in (own, full)]
    return (
        check_at_least(named[0], saved, SEVERAL),
        Check(
            named[1],
            f"{off[0].words()} times with {own.num_kv_heads} KV heads, {off[1].words()} times with "
            f"{full.num_kv_heads}",
            all_of([rounds.within(1 - ERROR, 1 + ERROR) for rounds in off]),
        ),
    )


class KvHeads(Experiment):
    """Two pools of as many tokens, of which every row is written; what memory they take."""

    number, name = 6, "kv-heads"
    claim = "Grouped-query attention cuts the KV's memory several-fold."
    criteria = (
        "with a KV head for each query head a token takes at least "
        f"{SEVERAL:g} times the memory that it takes with the model's own KV heads",
        "measured memory is that of 2 × layers × KV heads × head size × bytes of an element, "
        f"within {100 * ERROR:g} %",
    )
    weight = 0.3

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """What the process takes more of when a pool is filled."""
        config, own = lab.engine.model.config, lab.engine.cache.shape
        if config.num_heads == config.num_kv_heads:
            raise CannotMeasureError(
                f"this model has a KV head for each of its {config.num_heads} query heads: there "
                "is no grouped-query attention to try"
            )
        full = dataclasses.replace(own, num_kv_heads=config.num_heads)
        num_blocks = max(1, POOL_BYTES // own.bytes_per_block)
        measured: dict[KvShape, list[float]] = {own: [], full: []}
        for _ in range(NUM_ROUNDS):
            if budget.is_over:
                raise CannotMeasureError("the time was over before two rounds were made")
            for shape, values in measured.items():
                taken = _memory_of(shape, num_blocks, lab.engine.device)
                values.append(taken / ((num_blocks + 1) * shape.block_size))
        found = [
            KvBytes(shape.num_kv_heads, shape.bytes_per_token, tuple(values))
            for shape, values in measured.items()
        ]
        return _outcome(found[0], found[1], config.context_length)


def _memory_of(shape: KvShape, num_blocks: int, device: torch.device) -> int:
    """Bytes that a written pool takes."""
    gc.collect()
    if device.type == "cpu":
        # The allocator keeps what is left of its last chunk: a pool before this one would be given
        # back while this one is measured. It is larger than a chunk, and never written.
        huge_pages.empty((64 << 20,), torch.uint8)
    before = _memory(device)
    cache = KvCache(shape, num_blocks, device)
    for pages in cache.layers:
        for part in (pages.k, pages.v, pages.k_scale, pages.v_scale):
            if part is not None:
                part.view(torch.uint8).fill_(1)
    return _memory(device) - before


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not _STATM.exists():
        raise CannotMeasureError("this system does not say what memory a process takes")
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _outcome(own: KvBytes, full: KvBytes, context_length: int) -> Outcome:
    rows = tuple(
        (
            name,
            str(kv.num_kv_heads),
            f"{kv.predicted:,}",
            Rounds(kv.measured).words(),
            number(kv.predicted * context_length / (1 << 20)),
            f"{(8 << 30) // (kv.predicted * context_length):,}",
        )
        for name, kv in (("as the model is", own), ("a KV head for each query head", full))
    )
    head: tuple[str, ...] = ("pool", "KV heads", "bytes a token, predicted", "measured")
    head += (f"a context of {context_length:,} tokens, MiB", "such contexts in 8 GiB")
    return Outcome(
        checks(own, full),
        Table(head, rows),
        BarChart(
            "KV bytes of a token, with and without grouped-query attention",
            f"{own.num_kv_heads} KV heads take {own.predicted:,} bytes a token; "
            f"{full.num_kv_heads}, one for each query head, {full.predicted:,}.",
            "bytes a token",
            (f"{own.num_kv_heads} KV heads", f"{full.num_kv_heads} KV heads"),
            (
                ("predicted", (float(own.predicted), float(full.predicted))),
                (
                    "measured",
                    (round(Rounds(own.measured).median), round(Rounds(full.measured).median)),
                ),
            ),
        ),
        (
            "Measured is what the process's memory grows by when every row of a pool is written, "
            "over the pool's tokens. The pool with a KV head for each query head is not this "
            "model's: it is what the same model without grouped queries would need.",
        ),
    )
