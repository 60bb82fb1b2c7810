"""What each experiment says of measurements: every claim can hold, and can fail to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from legato.bench.experiments import (
    batch_size,
    forward_count,
    interference,
    kv_heads,
    load_settings,
    prompt_length,
    recomputation,
    roofline,
    token_arithmetic,
    weight_forms,
)
from legato.bench.experiments.batch_size import BatchPoint
from legato.bench.experiments.finding import Answer, Check, Verdict, judge
from legato.bench.experiments.forward_count import CountedAnswer
from legato.bench.experiments.interference import throughput_words
from legato.bench.experiments.interference_run import Sizes, Turn
from legato.bench.experiments.kv_heads import KvBytes
from legato.bench.experiments.load_settings import Burst
from legato.bench.experiments.prompt_length import PromptTimes
from legato.bench.experiments.recomputation import RecomputedTimes, matrix_work
from legato.bench.experiments.roofline import RoofPoint
from legato.bench.experiments.rounds import Rounds, number
from legato.bench.experiments.run import EXPERIMENTS
from legato.bench.experiments.timed_service import AnswerTimes
from legato.bench.experiments.token_arithmetic import FormulaPoint, example_s
from legato.bench.experiments.weight_forms import FormTimes
from legato.plan.model_cost import ModelCost

if TYPE_CHECKING:
    from collections.abc import Sequence

YES, NO, UNCLEAR = Answer.YES, Answer.NO, Answer.UNCLEAR
COST = ModelCost(1000, 10, layer_weights=400, head_weights=100, attention_width=5)


def answers(checks: Sequence[Check]) -> list[Answer]:
    return [check.answer for check in checks]


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ([YES, YES], Verdict.HOLDS),
        ([YES, NO], Verdict.IN_PART),
        ([YES, UNCLEAR], Verdict.IN_PART),
        ([NO, NO], Verdict.DOES_NOT_HOLD),
        ([NO, UNCLEAR], Verdict.DOES_NOT_HOLD),
        ([UNCLEAR, UNCLEAR], Verdict.NOT_MEASURED),
        ([], Verdict.NOT_MEASURED),
    ],
)
def test_the_verdict_follows_from_the_answers(given: list[Answer], verdict: Verdict) -> None:
    checks = [Check(f"statement {i}", f"figure {i}", a) for i, a in enumerate(given)]
    found, reason = judge(checks)
    assert found is verdict
    for check in checks:  # what was not met is told with its figure
        assert (check.measured in reason) == (check.answer is not YES)


def test_a_limit_within_the_middle_half_of_the_rounds_is_unclear() -> None:
    rounds = Rounds((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (rounds.low, rounds.median, rounds.high) == (2.0, 3.0, 4.0)
    assert [rounds.at_least(x) for x in (2.0, 2.1, 4.0, 4.1)] == [YES, UNCLEAR, UNCLEAR, NO]
    assert [rounds.at_most(x) for x in (4.0, 3.9, 2.0, 1.9)] == [YES, UNCLEAR, UNCLEAR, NO]
    assert rounds.within(2, 4) is YES
    assert rounds.within(2, 3) is UNCLEAR
    assert rounds.within(5, 9) is NO
    assert rounds.words("ms", 1000) == "3,000 ms (middle half of 5 rounds: 2,000 to 4,000)"


def test_one_round_tells_nothing() -> None:
    for rounds in (Rounds((0.25,)), Rounds(())):
        assert rounds.at_least(0.1) is rounds.at_most(9) is rounds.within(0.1, 9) is UNCLEAR
    assert Rounds((0.25,)).words("ms") == "0.250 ms (one round)"
    assert Rounds(()).words("ms") == "nothing"


def test_ratios_are_of_the_same_round() -> None:
    # The second round was three times as slow for both: that changes nothing.
    assert Rounds.ratios([2.0, 6.0], [1.0, 3.0]).values == (2.0, 2.0)
    assert [number(x) for x in (0, 0.00123, 0.5, 7.21, 42.6, 1234.5)] == [
        *("0", "0.00123", "0.500", "7.21", "42.6", "1,234")
    ]


def test_forwards_and_rows_are_counted_exactly() -> None:
    def counted(forwards: tuple[int, ...], rows: tuple[int, ...]) -> list[Answer]:
        return answers(forward_count.checks([CountedAnswer(24, 3, forwards, rows)]))

    assert counted((24, 1, 1), (26, 26)) == [YES, YES]
    assert counted((24, 1, 1, 1), (27, 27)) == [NO, NO]  # the last token was processed
    assert counted((24, 1, 1), (26, 27)) == [YES, NO]  # in one layer only
    assert counted((12, 12, 1), (26, 26)) == [NO, YES]  # two forwards for the prompt


def test_work_without_the_cache_is_that_of_every_history() -> None:
    assert matrix_work(COST, 4, cached=True) == 2 * 400 * 4
    assert matrix_work(COST, 4, cached=False) == 2 * 400 * (1 + 2 + 3 + 4)


def test_recomputation_is_told_from_a_cache_by_its_growth() -> None:
    lengths = (16, 128, 1024)
    linear = tuple((0.001 * n,) * 2 for n in lengths)  # a token behind n others
    flat = ((0.01, 0.01), (0.0102, 0.0102), (0.011, 0.011))

    def judged(with_cache: object, without: object) -> list[Answer]:
        times = RecomputedTimes(lengths, with_cache, without)  # type: ignore[arg-type]  # of two
        return answers(recomputation.checks(times, COST))

    assert judged(flat, linear) == [YES, YES, YES, YES]
    assert judged(linear, flat) == [YES, NO, NO, YES]  # the sides swapped
    even = ((0.01, 0.01),) * 3
    assert judged(even, even) == [YES, NO, YES, NO]  # attention costs nothing


def test_totals_have_straight_lines_between_lengths() -> None:
    times = RecomputedTimes((2, 4), ((1.0,), (3.0,)), ((1.0,), (1.0,)))
    assert times.totals(times.with_cache, 4) == [1 + 1 + 2 + 3]
    assert times.totals(times.without, 3) == [3.0]


def roof_point(
    *, ops: float, num_bytes: float, peak: tuple[float, ...] = (100.0,) * 2
) -> RoofPoint:
    return RoofPoint(1, False, ops, num_bytes, (1.0,) * 2, peak, (10.0,) * 2)


def test_the_roofline_names_the_nearer_limit() -> None:
    compute = roof_point(ops=80, num_bytes=1)
    memory = roof_point(ops=10, num_bytes=9)
    assert answers(roofline.checks(compute, memory)) == [YES] * 4
    assert answers(roofline.checks(memory, compute)) == [NO] * 4
    far = roof_point(ops=40, num_bytes=1)  # on the right side, but far below the roof
    assert answers(roofline.checks(far, memory)) == [NO, YES, YES, YES]


def test_without_a_measured_peak_only_the_bandwidth_can_be_told() -> None:
    prompt = roof_point(ops=80, num_bytes=1, peak=())
    decode = roof_point(ops=10, num_bytes=9, peak=())
    assert answers(roofline.checks(prompt, decode)) == [UNCLEAR, UNCLEAR, YES, UNCLEAR]


def test_ttft_grows_and_further_tokens_do_not() -> None:
    lengths = (32, 256, 2048)
    growing, flat = ((0.05,) * 2, (0.3,) * 2, (2.0,) * 2), ((0.02,) * 2, (0.021,) * 2, (0.024,) * 2)
    assert answers(prompt_length.checks(PromptTimes(lengths, growing, flat))) == [YES] * 4
    assert answers(prompt_length.checks(PromptTimes(lengths, flat, growing))) == [YES, NO, NO, NO]
    falling = ((0.05,) * 2, (0.04,) * 2, (2.0,) * 2)
    checks = prompt_length.checks(PromptTimes(lengths, falling, flat))
    assert answers(checks) == [NO, YES, YES, YES]
    assert "256" in checks[0].measured


def batch_points(rates: dict[int, float], most: float) -> list[BatchPoint]:
    return [BatchPoint(n, min(n, most), (rate, rate)) for n, rate in rates.items()]


def test_the_batch_bends_where_arithmetic_says() -> None:
    good = {1: 10.0, 2: 19.0, 4: 35.0, 6: 50.0, 9: 51.0, 12: 50.0}
    assert answers(batch_size.checks(batch_points(good, 6), 6)) == [YES, YES, YES]
    slow = good | {2: 12.0}
    assert answers(batch_size.checks(batch_points(slow, 6), 6)) == [NO, YES, YES]
    # More than fit were taken in, and made more tokens.
    checks = batch_size.checks(batch_points(good | {12: 90.0}, 12), 6)
    assert answers(checks) == [YES, NO, NO]
    noisy = [
        dataclasses.replace(p, tokens_per_s=(10.0, 20.0) if p.offered == 2 else p.tokens_per_s)
        for p in batch_points(good, 6)
    ]
    assert answers(batch_size.checks(noisy, 6))[0] is UNCLEAR


def test_kv_heads_save_what_is_predicted() -> None:
    own, full = KvBytes(3, 100, (101.0, 100.0)), KvBytes(9, 300, (303.0, 300.0))
    assert answers(kv_heads.checks(own, full)) == [YES, YES]
    assert answers(kv_heads.checks(full, own)) == [NO, YES]  # the pools swapped
    padded = dataclasses.replace(own, measured=(150.0, 150.0))
    assert answers(kv_heads.checks(padded, full)) == [YES, NO]


def test_weights_speed_decode_by_their_bytes() -> None:
    base = FormTimes("bfloat16", 400, (0.4, 0.4), (1.0, 1.0))
    int8 = FormTimes("int8", 200, (0.21, 0.22), (0.9, 0.9))
    int4 = FormTimes("int4", 100, (0.13, 0.13), (1.1, 1.1))
    assert answers(weight_forms.checks(base, [int8, int4])) == [YES] * 4
    slow = dataclasses.replace(int4, decode_s=(0.2, 0.2))  # as int8, with half its bytes
    quick = dataclasses.replace(int8, prefill_s=(0.5, 0.5))
    assert answers(weight_forms.checks(base, [quick, slow])) == [YES, NO, NO, YES]


def test_the_planners_formula_gives_the_example() -> None:
    assert example_s() == pytest.approx(0.007)
    near = FormulaPoint(1, (1.2, 1.3), (1.0, 1.0))
    far = FormulaPoint(8, (2.0, 2.1), (1.0, 1.0))
    below = FormulaPoint(8, (0.5, 0.5), (1.0, 1.0))
    assert answers(token_arithmetic.checks(0.007, near, near)) == [YES, YES, YES]
    assert answers(token_arithmetic.checks(0.014, far, below)) == [NO, NO, NO]


def burst(tokens_per_s: float, whole_s: float, gap_s: float) -> Burst:
    return Burst(tokens_per_s, (whole_s,), 0.1, gap_s)


def test_a_higher_rate_may_come_with_later_answers() -> None:
    batch, latency = burst(200, 5.0, 0.08), burst(100, 4.0, 0.03)
    assert answers(load_settings.checks([batch] * 2, [latency] * 2)) == [YES, YES, YES]
    earlier = burst(200, 3.0, 0.03)
    assert answers(load_settings.checks([earlier] * 2, [latency] * 2)) == [YES, NO, NO]


def test_without_a_higher_rate_the_claim_cannot_be_tried() -> None:
    slow, latency = burst(100, 5.0, 0.08), burst(100, 4.0, 0.03)
    checks = load_settings.checks([slow] * 2, [latency] * 2)
    assert judge(checks)[0] is Verdict.NOT_MEASURED


def test_a_burst_is_summed_up() -> None:
    found = Burst.of([AnswerTimes(1.0, (2.0, 3.0)), AnswerTimes(1.0, (1.5, 5.0))])
    assert found.tokens_per_s == 4 / 4
    assert found.whole_s == (2.0, 4.0)
    assert (found.median_ttft_s, found.median_gap_s) == (0.75, 2.25)


def turn(quiet: float, busy: float, rate: float = 100) -> Turn:
    return Turn(quiet, busy, 2 * busy, 1.0, rate)


def test_apart_keeps_streams_even_where_colocated_does_not() -> None:
    apart, held_up, mild = [turn(0.02, 0.025)] * 2, [turn(0.02, 0.9)] * 2, [turn(0.02, 0.1)] * 2
    assert answers(interference.checks(apart, [held_up, mild])) == [YES, YES]
    assert answers(interference.checks(held_up, [apart, mild])) == [NO, NO]  # the sides swapped
    # One colocated arrangement that is as even is enough for a no.
    assert answers(interference.checks(apart, [held_up, apart])) == [NO, YES]


def test_who_wins_in_total_throughput_is_said() -> None:
    words = throughput_words([turn(1, 1, 100)], {"two": [turn(1, 1, 150)], "one": [turn(1, 1, 90)]})
    assert "colocated wins here: two makes 1.50 times" in words
    words = throughput_words([turn(1, 1, 200)], {"two": [turn(1, 1, 150)]})
    assert "apart is not behind here: 1.33 times" in words


def test_turns_are_sized_by_the_time() -> None:
    assert Sizes.within(10) == Sizes(1.0, 2, 8)
    assert Sizes.within(600) == Sizes(4.0, 5, 16)


def test_all_ten_claims_are_there_with_criteria() -> None:
    assert list(EXPERIMENTS) == list(range(1, 11))
    assert len({experiment.name for experiment in EXPERIMENTS.values()}) == 10
    for experiment in EXPERIMENTS.values():
        assert len(experiment.criteria) >= 2
        assert experiment.claim.endswith(".")
