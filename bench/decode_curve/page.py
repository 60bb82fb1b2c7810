"""Page: the curve and the overload as Markdown."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from legato.bench.decode_curve.batch_sizes import BatchSizes, Bend, Point
    from legato.bench.decode_curve.overload import Overload, OverloadRow

NAME = "decode-curve"


@dataclass(frozen=True)
class Setting:
    """With what it was measured."""

    model: str
    weights: str
    dtype: str
    kv_cache: str
    device: str
    num_threads: int
    block_size: int
    quick: bool = False  # in short turns


@dataclass(frozen=True)
class TraceFigures:
    """What the trace under overload is like."""

    num_requests: int
    prompt_tokens: tuple[int, int, int]  # shortest, median, longest; of the answers too
    answer_tokens: tuple[int, int, int]
    max_tokens: int
    cut_off: int  # answers that ended by max_tokens
    seed: int


def curve_table(points: SequenceOf[Point]) -> str:
    """A row for each number of requests."""
    head = [
        "requests offered",
        "batch",
        "KV held",
        "tokens/s (range)",
        "bandwidth limit",
        "product limit",
        "of the bandwidth",
    ]
    rows = [
        [
            str(point.offered),
            f"{point.mean_batch:.1f}",
            f"{point.pool_held:.0%}",
            f"{point.tokens_per_s:.0f} "
            f"({point.tokens_per_s_lowest:.0f}–{point.tokens_per_s_highest:.0f})",
            f"{point.bandwidth_tokens_per_s:.0f}",
            "–" if point.product_tokens_per_s is None else f"{point.product_tokens_per_s:.0f}",
            f"{point.of_bandwidth:.0%}",
        ]
        for point in points
    ]
    return _table(head, rows)


def overload_table(rows: SequenceOf[OverloadRow]) -> str:
    """A row for each rule."""
    head = [
        "admission",
        "risk",
        "KV blocks held",
        "KV rows in use",
        "mean batch",
        "decode tokens/s",
        "steps",
        "preemptions",
        "swapped",
        "recomputed",
        "blocks moved",
    ]
    cells = [
        [
            row.admission,
            "–" if row.risk is None else f"{row.risk:g}",
            f"{row.blocks_held:.1%}",
            f"{row.rows_in_use:.1%}",
            f"{row.mean_batch:.1f}",
            f"{row.tokens_per_s:.0f}",
            str(row.steps),
            str(row.preemptions),
            str(row.swaps),
            str(row.returns),
            str(row.blocks_moved),
        ]
        for row in rows
    ]
    return _table(head, cells)


def page(
    setting: Setting,
    sizes: BatchSizes,
    bend: Bend,
    points: SequenceOf[Point],
    overload: Overload,
    trace: TraceFigures,
    rows: SequenceOf[OverloadRow],
    plot: str | None,
) -> str:
    """The whole document; `plot` is the picture's file name."""
    warning = "**Measured in short turns (`--quick`): to see that it works, not to be quoted.**"
    num_rounds = points[0].rounds
    rounds = f"Medians of {num_rounds} interleaved rounds" if num_rounds > 1 else "One round"
    picture = f"![Decode tokens/s and KV occupancy]({plot})" if plot is not None else ""
    blocks = [
        "# Decode until the KV cache is full",
        _paragraph(
            f"""Written by `python -m legato.bench.decode_curve`; do not edit. The engine is the
            bare one: scheduler, model and sampler in one thread. Model `{setting.model}`, weights
            {setting.weights}, KV {setting.kv_cache}, device {setting.device},
            {setting.num_threads} threads; the KV pool has {bend.pool_blocks} blocks of
            {setting.block_size} tokens: {bend.pool_tokens} rows."""
        ),
        warning if setting.quick else "",
        picture,
        "## Tokens/s against the batch",
        _paragraph(
            f"""Prompts of {sizes.prompt_tokens} tokens, answers of {sizes.max_tokens}, so
            {bend.sequence_tokens} rows of KV a sequence at its end: {bend.sequence_blocks}
            blocks. By arithmetic {bend.pool_blocks} // {bend.sequence_blocks} =
            **{bend.batch_size} sequences fit**, and of more requests the rest waits: batch and
            tokens/s stay what they are. As many requests as offered are under way or waiting all
            the time, admitted by `reserve`: all are of one length, and there is nothing to guess.
            Prefill is not timed. {rounds} of {sizes.num_steps} steps."""
        ),
        curve_table(points),
        _paragraph(
            """*Bandwidth limit*: the tokens/s of steps that do nothing but read every weight once
            and the KV of the batch, at the best read rate measured beside each point. *Product
            limit*: those of steps that do nothing but multiply, attention left out, at the best
            rate for the products' type. What is above the lower of the two is noise."""
        ),
        "## Occupancy under overload",
        _paragraph(
            f"""{trace.num_requests} chats, all there at the start: prompts of
            {_spread(trace.prompt_tokens)} tokens (shortest, median, longest), temperature 1,
            `max_tokens` {trace.max_tokens}, seed {trace.seed}. The answers end by themselves, at
            {_spread(trace.answer_tokens)} tokens; {trace.cut_off} were cut off. A token depends
            on seed and place alone, so each answer must be the same under every rule: it was."""
        ),
        overload_table(rows),
        _paragraph(
            f"""*KV blocks held* is the mean share of the pool's blocks that belong to sequences,
            *KV rows in use* that of its rows that have KV in them: a sequence's last block is
            seldom full. What `reserve` has promised and nobody holds yet lies idle. Both, the
            mean batch and the tokens/s are over the steps at which requests waited for room,
            after the first {overload.warm_up_answers} answers had ended: until then `expected`
            goes by a guess of how long answers are. The other columns are of the whole run;
            `steps` are the decode steps that all answers took. Decisions go by a clock that
            advances with the steps: but for tokens/s, every figure of this table is the same on
            any machine whose arithmetic is the same."""
        ),
        "Prefill takes no time on that clock, so no block waits for KV to arrive.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def _spread(values: tuple[int, int, int]) -> str:
    return ", ".join(map(str, values))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
