"""Rows and ratios: the rounds' figures as medians, and ours against the best tuned peer's."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from legato.bench.peers.interference.contender import OURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.peers.interference.contender import Contender
    from legato.bench.peers.interference.workload import PhaseFigures

# What one prefill and one decode worker are to reach; see docs/benchmarks.md.
GOAL_OF_PEER_ITL = 0.25
GOAL_OF_OWN_QUIET = 1.5
GOAL_OF_PEER_TTFT = 2.0


@dataclass(frozen=True)
class Turn:
    """One contender in one round: the same streams alone, and with prompts that arrive."""

    round_number: int
    contender: Contender
    version: str
    quiet: PhaseFigures
    arrivals: PhaseFigures
    others_share: float  # of the machine's CPU time, taken by neither it nor its clients


@dataclass(frozen=True)
class Row:
    """A contender's medians over the rounds; worst are the worst of all rounds."""

    contender: Contender
    num_rounds: int
    quiet_itl_p50_s: float
    quiet_itl_p99_s: float
    quiet_worst_gap_s: float
    itl_p50_s: float
    itl_p99_s: float
    worst_gap_s: float
    ttft_p50_s: float
    ttft_worst_s: float
    quiet_tokens_per_s: float
    tokens_per_s: float
    of_own_quiet: float  # ITL p99 with arrivals over that without
    others_share: float  # the highest of all turns


@dataclass(frozen=True)
class Ratio:
    """One of ours over the best tuned peer; below 1 ours is better. Ranges are within rounds."""

    ours: str
    peer: str
    itl_p99: float
    itl_p99_lowest: float
    itl_p99_highest: float
    ttft: float
    ttft_lowest: float
    ttft_highest: float
    of_own_quiet: float
    meets: bool  # all three goals


def rows(turns: Sequence[Turn]) -> list[Row]:
    """One for each contender, in the order in which they were first run."""
    groups: dict[Contender, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.contender, []).append(turn)
    return [_row(contender, group) for contender, group in groups.items()]


def _row(contender: Contender, turns: Sequence[Turn]) -> Row:
    def middle(name: str, *, quiet: bool = False) -> float:
        phases = [turn.quiet if quiet else turn.arrivals for turn in turns]
        return float(statistics.median(getattr(phase, name) for phase in phases))

    return Row(
        contender=contender,
        num_rounds=len(turns),
        quiet_itl_p50_s=middle("itl_p50_s", quiet=True),
        quiet_itl_p99_s=middle("itl_p99_s", quiet=True),
        quiet_worst_gap_s=max(turn.quiet.worst_gap_s for turn in turns),
        itl_p50_s=middle("itl_p50_s"),
        itl_p99_s=middle("itl_p99_s"),
        worst_gap_s=max(turn.arrivals.worst_gap_s for turn in turns),
        ttft_p50_s=middle("ttft_p50_s"),
        ttft_worst_s=max(_ttft_worst(turn) for turn in turns),
        quiet_tokens_per_s=middle("tokens_per_s", quiet=True),
        tokens_per_s=middle("tokens_per_s"),
        of_own_quiet=statistics.median(
            turn.arrivals.itl_p99_s / turn.quiet.itl_p99_s for turn in turns
        ),
        others_share=max(turn.others_share for turn in turns),
    )


def best_peer(turned: Sequence[Row]) -> Row | None:
    """Of the tuned peers the one with the lowest ITL p99 under arrivals; where none is tuned, of
    all. None where there is no peer.
    """
    peers = [row for row in turned if row.contender.is_peer]
    tuned = [row for row in peers if row.contender.chunk is not None]
    return min(tuned or peers, key=lambda row: row.itl_p99_s, default=None)


def ratios(turns: Sequence[Turn]) -> list[Ratio]:
    """One for each of ours; none without a peer."""
    turned = rows(turns)
    best = best_peer(turned)
    if best is None:
        return []
    theirs = {turn.round_number: turn for turn in turns if turn.contender == best.contender}
    found = []
    for row in turned:
        if row.contender.peer not in OURS:
            continue
        pairs = [
            (turn, theirs[turn.round_number])
            for turn in turns
            if turn.contender == row.contender and turn.round_number in theirs
        ]
        itl = [ours.arrivals.itl_p99_s / peer.arrivals.itl_p99_s for ours, peer in pairs]
        ttft = [_ttft(ours) / _ttft(peer) for ours, peer in pairs]
        of_itl = row.itl_p99_s / best.itl_p99_s
        of_ttft = row.ttft_p50_s / best.ttft_p50_s
        found.append(
            Ratio(
                ours=row.contender.label,
                peer=best.contender.label,
                itl_p99=of_itl,
                itl_p99_lowest=min(itl, default=of_itl),
                itl_p99_highest=max(itl, default=of_itl),
                ttft=of_ttft,
                ttft_lowest=min(ttft, default=of_ttft),
                ttft_highest=max(ttft, default=of_ttft),
                of_own_quiet=row.of_own_quiet,
                meets=of_itl <= GOAL_OF_PEER_ITL
                and row.of_own_quiet <= GOAL_OF_OWN_QUIET
                and of_ttft <= GOAL_OF_PEER_TTFT,
            )
        )
    return found


def table(turned: Sequence[Row], failures: Sequence[tuple[str, str]]) -> str:
    """Markdown: times in ms. `failures`: who could not be measured, and why."""
    lines = [
        [
            "contender",
            "quiet ITL p50 / p99 / worst",
            "ITL p50 / p99 / worst",
            "p99 of own quiet",
            "TTFT p50 / worst",
            "tokens/s quiet / beside",
            "others",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    for row in turned:
        quiet = (row.quiet_itl_p50_s, row.quiet_itl_p99_s, row.quiet_worst_gap_s)
        beside = (row.itl_p50_s, row.itl_p99_s, row.worst_gap_s)
        lines.append(
            [
                row.contender.label,
                _ms(*quiet),
                _ms(*beside),
                f"{row.of_own_quiet:.2f}",
                _ms(row.ttft_p50_s, row.ttft_worst_s),
                f"{row.quiet_tokens_per_s:.0f} / {row.tokens_per_s:.0f}",
                f"{row.others_share:.0%}",
            ]
        )
    width = len(lines[0]) - 2
    for label, reason in failures:
        lines.append([label, f"not measured: {_in_short(reason)}", *["–"] * width])
    return _markdown(lines)


def ratio_table(found: Sequence[Ratio]) -> str:
    """Markdown: ours over the best tuned peer, beside the goals."""
    lines = [
        [
            "ours",
            "best tuned peer",
            f"ITL p99 (goal {GOAL_OF_PEER_ITL:g})",
            f"p99 of own quiet (goal {GOAL_OF_OWN_QUIET:g})",
            f"TTFT (goal {GOAL_OF_PEER_TTFT:g})",
            "goals",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    lines += [
        [
            ratio.ours,
            ratio.peer,
            f"{ratio.itl_p99:.2f} ({ratio.itl_p99_lowest:.2f}–{ratio.itl_p99_highest:.2f})",
            f"{ratio.of_own_quiet:.2f}",
            f"{ratio.ttft:.2f} ({ratio.ttft_lowest:.2f}–{ratio.ttft_highest:.2f})",
            "met" if ratio.meets else "not met",
        ]
        for ratio in found
    ]
    return _markdown(lines)


def as_json(one: Row | Turn | Ratio) -> dict[str, object]:
    """Plain values; a contender is its label."""
    values = asdict(one)
    if not isinstance(one, Ratio):
        values["contender"] = one.contender.label
    return values


def _ttft(turn: Turn) -> float:
    assert turn.arrivals.ttft_p50_s is not None, "a phase with arrivals has prompts"
    return turn.arrivals.ttft_p50_s


def _ttft_worst(turn: Turn) -> float:
    assert turn.arrivals.ttft_worst_s is not None, "a phase with arrivals has prompts"
    return turn.arrivals.ttft_worst_s


def _in_short(reason: str) -> str:
    """What happened, and the last that the peer said."""
    first, *others = reason.strip().splitlines() or ["no reason was given"]
    if others:
        first = f"{first.partition(': ')[0][:80]}: {others[-1].strip()[:160]}"
    return first[:240].replace("|", "/")


def _ms(*seconds: float) -> str:
    return " / ".join(f"{1e3 * value:.0f}" for value in seconds)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
