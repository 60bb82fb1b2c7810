from __future__ import annotations

import pytest

from legato.cluster.autoscale_options import (
    AutoscaleOptions,
    PoolRange,
    duration_text,
    parse_duration,
    parse_ranges,
)


def test_ranges_come_in_any_order_and_one_number_is_both_ends() -> None:
    assert parse_ranges(("decode=2", "prefill=1..8")) == {
        "prefill": PoolRange(1, 8),
        "decode": PoolRange(2, 2),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prefill=1..8", "--ttft-slo"), "one is '--ttft-slo'"),
        (("prefill=1..8", "decode"), r"decode must be MIN\.\.MAX with .* <= 1024, got 'decode'"),
        (("prefill=1..8", "decode=1..x"), r"decode must be MIN\.\.MAX .* got 'decode=1\.\.x'"),
        (("prefill=1..8", "decode=-1..2"), r"decode must be MIN\.\.MAX .* got 'decode=-1\.\.2'"),
        (("prefill=1..9999999999", "decode=1"), "prefill: must be at most 1024 workers, got 1"),
        (("prefill=1..8", "colour=1..2"), "one is 'colour=1..2'"),
        (("prefill=1..8", "prefill=1..2"), "prefill is given twice"),
        (("prefill=1..8",), "decode=MIN..MAX is missing"),
        (("prefill=0..8", "decode=1"), "prefill: must be at least 1 worker, got 0..8"),
        (("prefill=1", "decode=4..2"), "decode: the least must come first, got 4..2"),
        (("prefill=1", "decode=1..1025"), "decode: must be at most 1024 workers, got 1..1025"),
    ],
)
def test_ranges_that_are_none_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ranges(words)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("500ms", "0.5s", "2 s", "1.5m", "86400s")] == [
        0.5,
        0.5,
        2.0,
        90.0,
        86_400.0,
    ]
    for text in ("500", "", "s", "1h", "-1s", "1e3s", "nan s", "٣s"):
        with pytest.raises(ValueError, match="must be a duration such as 500ms"):
            parse_duration(text)
    for text in ("0s", "0.0ms", "86401s"):
        with pytest.raises(ValueError, match=f"above 0 and at most 86400s, got {text}"):
            parse_duration(text)
    assert [duration_text(s) for s in (0, 0.0042, 0.05, 0.5, 1.7, 12.34, 123.4)] == [
        "0 ms",
        "4.2 ms",
        "50 ms",
        "500 ms",
        "1.7 s",
        "12.3 s",
        "123 s",
    ]


def test_options_name_the_field_that_is_wrong() -> None:
    both = PoolRange(1, 4), PoolRange(2, 3)
    for name in ("ttft_slo_s", "itl_slo_s", "up_after_s", "down_after_s", "cool_down_s"):
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e9):
            with pytest.raises(ValueError, match=f"{name} must be in"):
                AutoscaleOptions(*both, **{name: value})  # type: ignore[arg-type]  # names of floats


def test_an_operator_stays_within_the_ranges_unless_nothing_is_changed_anyway() -> None:
    options = AutoscaleOptions(PoolRange(1, 4), PoolRange(2, 3))
    options.check_targets({"prefill": 4, "decode": 2})
    with pytest.raises(ValueError, match=r"decode is 4, limit \[2, 3\]: the decode pool is auto"):
        options.check_targets({"prefill": 4, "decode": 4})
    AutoscaleOptions(PoolRange(1, 4), PoolRange(2, 3), dry_run=True).check_targets({"decode": 9})
