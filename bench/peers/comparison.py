"""Comparison: the rounds' figures as medians, and ours over the best peer's, row by row."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.limits import Limits
    from legato.bench.workload import Figures, Workload

OURS = "legato"


@dataclass(frozen=True)
class Turn:
    """One contender's run of one workload in one round."""

    round_number: int
    contender: str
    precision: str
    workload: Workload
    figures: Figures
    first_token_ids: list[int]  # of each request: do all compute the same model?
    limits: Limits  # of this round
    others_share: float  # of the machine's CPU time during the run, taken by other processes
    decode_of_bandwidth: float | None = None
    prefill_of_matmul: float | None = None


@dataclass(frozen=True)
class Row:
    """One workload at one precision; medians over the rounds."""

    workload: str
    precision: str
    metric: str
    values: dict[str, float]  # by contender
    best_peer: str | None
    ratio: float | None  # speed of ours over that of the best peer; > 1: ours is faster
    ratio_lowest: float | None  # the same within each round, lowest and highest
    ratio_highest: float | None
    same_first_tokens: float | None  # share of requests on which the best peer agrees with ours
    decode_of_bandwidth: float | None  # ours, as are the next
    prefill_of_matmul: float | None
    others_share: float  # the highest of all turns: above a few percent the row is doubtful


def metric_of(workload: Workload) -> str:
    """What counts: prompt tokens/s of answers of one token, ITL of one stream, else output rate."""
    if workload.max_tokens == 1:
        return "prompt_tokens_per_s"
    return "itl_p50_s" if workload.num_at_once == 1 else "output_tokens_per_s"


def rows(turns: Sequence[Turn]) -> list[Row]:
    """A row for each workload and precision, in the order in which they were first run."""
    groups: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.workload.name, turn.precision), []).append(turn)
    return [_row(group) for group in groups.values()]


def _row(turns: Sequence[Turn]) -> Row:
    workload = turns[0].workload
    metric = metric_of(workload)
    lower_is_better = metric.endswith("_s") and not metric.endswith("per_s")
    by_contender: dict[str, list[Turn]] = {}
    for turn in turns:
        by_contender.setdefault(turn.contender, []).append(turn)
    values = {
        name: statistics.median(_value(turn, metric) for turn in theirs)
        for name, theirs in by_contender.items()
    }

    def speed(value: float) -> float:
        return 1 / value if lower_is_better else value

    peers = [name for name in values if name != OURS]
    best = max(peers, key=lambda name: speed(values[name]), default=None)
    ours = by_contender.get(OURS, [])
    ratio = lowest = highest = same = None
    if best is not None and ours:
        ratio = speed(values[OURS]) / speed(values[best])
        theirs = {turn.round_number: turn for turn in by_contender[best]}
        pairs = [(turn, theirs[turn.round_number]) for turn in ours if turn.round_number in theirs]
        each = [speed(_value(a, metric)) / speed(_value(b, metric)) for a, b in pairs]
        lowest, highest = min(each, default=None), max(each, default=None)
        if pairs:
            same = _agreement(*pairs[0])
    return Row(
        workload=workload.name,
        precision=turns[0].precision,
        metric=metric,
        values=values,
        best_peer=best,
        ratio=ratio,
        ratio_lowest=lowest,
        ratio_highest=highest,
        same_first_tokens=same,
        decode_of_bandwidth=_median([turn.decode_of_bandwidth for turn in ours]),
        prefill_of_matmul=_median([turn.prefill_of_matmul for turn in ours]),
        others_share=max(turn.others_share for turn in turns),
    )


def table(turned: Sequence[Row], contenders: Sequence[str]) -> str:
    """Markdown: times in ms, rates in tokens a second."""
    head = [
        "workload",
        "precision",
        "figure",
        *contenders,
        "ours / best peer",
        "of the limit",
        "others",
    ]
    lines = [head, ["---"] * len(head)]
    for row in turned:
        scale, unit = (1e3, "ms") if row.metric == "itl_p50_s" else (1.0, "tok/s")
        name = {"itl_p50_s": "ITL", "prompt_tokens_per_s": "prompt"}.get(row.metric, "output")
        cells = [f"{row.values[c] * scale:.1f}" if c in row.values else "–" for c in contenders]
        ratio = "–"
        if row.ratio is not None:
            ratio = f"{row.ratio:.2f} ({row.ratio_lowest:.2f}–{row.ratio_highest:.2f})"
        decode = row.metric == "itl_p50_s"
        share = row.decode_of_bandwidth if decode else row.prefill_of_matmul
        if row.metric == "output_tokens_per_s":
            share = None  # prefill and decode in one figure: there is no one limit
        of_limit = "–" if share is None else f"{share:.0%}"
        others = f"{row.others_share:.0%}"
        lines.append(
            [row.workload, row.precision, f"{name} {unit}", *cells, ratio, of_limit, others]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row_json(row: Row) -> dict[str, object]:
    """As a JSON line."""
    return {"row": asdict(row)}


def _value(turn: Turn, metric: str) -> float:
    value = getattr(turn.figures, metric)
    assert isinstance(value, float), f"{metric} of {turn.workload.name} is {value!r}"
    return value


def _agreement(a: Turn, b: Turn) -> float:
    equal = [x == y for x, y in zip(a.first_token_ids, b.first_token_ids, strict=True)]
    return sum(equal) / len(equal)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
