"""Streams beside arriving prompts: contenders, and how figures become a verdict."""

from __future__ import annotations

import pytest

from legato.bench.peers.interference.contender import Contender
from legato.bench.peers.interference.ratios import (
    Turn,
    best_peer,
    ratio_table,
    ratios,
    rows,
    table,
)
from legato.bench.peers.interference.workload import (
    PhaseFigures,
)


def test_contenders_are_named_and_tuned() -> None:
    assert Contender.of("vllm:256") == Contender("vllm", 256)
    assert Contender.of("vllm:256").label == "vllm:256"
    assert Contender.of("legato").is_peer is False
    for text, words in (
        ("nobody", "is none of"),
        ("vllm:", "at least 1"),
        ("vllm:0", "at least 1"),
        ("legato:256", "not tuned"),
        ("onnxgenai:256", "not tuned"),
    ):
        with pytest.raises(ValueError, match=words):
            Contender.of(text)


def turn(
    label: str, p99_s: float, *, number: int = 0, ttft_s: float = 1.0, quiet_s: float = 0.02
) -> Turn:
    quiet = PhaseFigures(quiet_s / 2, quiet_s, 2 * quiet_s, 100, 50.0, None, None, 0)
    beside = PhaseFigures(p99_s / 2, p99_s, 2 * p99_s, 100, 40.0, ttft_s, 2 * ttft_s, 5)
    return Turn(number, Contender.of(label), "v", quiet, beside, 0.01 * (number + 1))


def test_the_best_peer_is_the_tuned_one_with_the_least_p99() -> None:
    turns = [
        turn("legato", 0.030),
        turn("engine", 0.001),
        turn("vllm", 0.1),
        turn("vllm:256", 0.2),
        turn("llamacpp:128", 0.3),
    ]
    best = best_peer(rows(turns))
    assert best is not None
    assert best.contender.label == "vllm:256"
    untuned = best_peer(rows(turns[:3]))
    assert untuned is not None
    assert untuned.contender.label == "vllm"
    assert best_peer(rows(turns[:2])) is None
    assert ratios(turns[:2]) == []


def test_ratios_are_of_medians_with_the_range_of_the_rounds() -> None:
    ours = [0.02, 0.04, 0.03]
    theirs = [0.2, 0.1, 0.3]
    turns = [turn("legato", p, number=i, ttft_s=1.5 + i) for i, p in enumerate(ours)]
    turns += [turn("vllm:256", p, number=i) for i, p in enumerate(theirs)]
    [ratio] = ratios(turns)
    assert (ratio.ours, ratio.peer) == ("legato", "vllm:256")
    assert ratio.itl_p99 == pytest.approx(0.03 / 0.2)
    assert (ratio.itl_p99_lowest, ratio.itl_p99_highest) == pytest.approx((0.1, 0.4))
    assert ratio.ttft == pytest.approx(2.5)
    assert (ratio.ttft_lowest, ratio.ttft_highest) == pytest.approx((1.5, 3.5))
    assert ratio.of_own_quiet == pytest.approx(1.5)
    assert rows(turns)[0].worst_gap_s == pytest.approx(0.08)
    assert rows(turns)[0].others_share == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("p99_s", "quiet_s", "ttft_s", "meets"),
    [
        (0.025, 0.02, 2.0, True),
        (0.026, 0.02, 2.0, False),  # of the peer's p99
        (0.025, 0.016, 2.0, False),  # of its own
        (0.025, 0.02, 2.1, False),  # of the peer's TTFT
    ],
)
def test_all_three_goals_make_the_verdict(
    p99_s: float, quiet_s: float, ttft_s: float, meets: bool
) -> None:
    turns = [turn("legato", p99_s, quiet_s=quiet_s, ttft_s=ttft_s), turn("vllm:256", 0.1)]
    [ratio] = ratios(turns)
    assert ratio.meets is meets
    assert ("| met |" in ratio_table([ratio])) is meets


def test_the_table_has_figures_and_reasons() -> None:
    text = table(rows([turn("legato", 0.03)]), [("vllm:64", "not ready within 3 s: a\nb | c")])
    _, _, ours, theirs = text.splitlines()
    assert ours == ("| legato | 10 / 20 / 40 | 15 / 30 / 60 | 1.50 | 1000 / 2000 | 50 / 40 | 1% |")
    assert theirs.startswith("| vllm:64 | not measured: not ready within 3 s: b / c | – |")
    assert theirs.count("|") == ours.count("|")


# Processes, and the whole.
