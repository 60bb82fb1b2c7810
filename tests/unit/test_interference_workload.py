"""Streams beside arriving prompts: what of a phase is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from interference_records import plan, record, steady

from legato.bench.peers.interference.workload import (
    Deliveries,
    Interference,
    PhaseRecord,
    figures,
)

# What a phase measured.


def test_prompts_are_due_through_the_window_and_share_no_beginning() -> None:
    work = Interference(every_s=2.0, window_s=5.0)
    phases = [work.phase(49152, number, arrivals=True) for number in range(3)]
    assert phases[0].dues_s == [0.0, 2.0, 4.0]
    assert work.phase(49152, 0, arrivals=False).prompts == []
    prompts = [tuple(p) for phase in phases for p in (*phase.streams, *phase.prompts)]
    assert len({prompt[:1] for prompt in prompts}) == len(prompts) == 3 * 7
    assert {len(prompt) for prompt in prompts} == {128, 1024}
    assert min(map(min, prompts)) >= 16
    assert max(map(max, prompts)) < 49152


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_streams", 0, "num_streams must be at least 1, got 0"),
        ("window_s", 0.0, "window_s must be above 0"),
        ("every_s", 21.0, "every_s 21 is beyond window_s 20"),
    ],
)
def test_a_workload_that_measures_nothing_is_refused(field: str, value: float, words: str) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=words):
        replace(Interference(), **changed)


def test_gaps_are_of_the_streams_and_ttft_counts_from_when_a_prompt_was_due() -> None:
    found = figures(plan(), record())
    assert found.itl_p50_s == pytest.approx(0.1)
    assert found.worst_gap_s == pytest.approx(0.1)
    assert found.tokens_per_s == pytest.approx(20.0, abs=0.3)
    assert found.ttft_p50_s == pytest.approx(0.7)  # 3.7 - (2 + 1)
    assert (found.ttft_worst_s, found.num_prompts) == (found.ttft_p50_s, 1)
    quiet = figures(plan(prompts=[], dues_s=[]), record(prompts=[]))
    assert (quiet.ttft_p50_s, quiet.ttft_worst_s, quiet.num_prompts) == (None, None, 0)


def test_a_stall_counts_in_the_window_and_across_its_ends_only() -> None:
    def worst(*times: float) -> float:
        stream = Deliveries(sorted([*steady(1.9).times_s, *times]), [1] * (17 + len(times)))
        return figures(plan(), record(streams=[stream, steady(12.1)])).worst_gap_s

    even = [2.0 + 0.1 * i for i in range(101)]
    assert worst(*even) < 0.2
    assert worst(*[t for t in even if not 5.05 < t < 6.95]) == pytest.approx(2.0)
    assert worst(*[t for t in even if t > 3.95]) == pytest.approx(4.0 - 1.7)  # begun before
    # A stream that never says anything again has the longest gap of all.
    assert worst(*[t for t in even if t < 4.05]) == pytest.approx(12.1 - 4.0)


def test_what_was_before_and_after_the_window_does_not_count() -> None:
    slow = Deliveries([0.1, 1.9, *[2.0 + 0.1 * i for i in range(101)], 15.0], [1] * 104)
    found = figures(plan(), record(streams=[slow, steady(15.0)], ended_s=15.1))
    assert found.worst_gap_s == pytest.approx(0.1)


def test_tokens_of_one_message_are_one_gap_and_all_count_as_tokens() -> None:
    bursts = Deliveries([0.1 + 0.5 * i for i in range(24)], [5] * 24)
    found = figures(plan(), record(streams=[bursts, bursts]))
    assert found.itl_p50_s == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(20.0, abs=0.1)
    stream = Deliveries()
    stream.note(1.0, 0)
    assert stream.times_s == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"streams": [steady(12.1)]}, "1 of 2 streams"),
        ({"begin_s": None}, "2 of 2 streams had a token within 5 s"),
        ({"streams": [steady(12.1), Deliveries()], "begin_s": None}, "1 of 2 streams had"),
        ({"streams": [steady(12.1), steady(12.1, first_s=2.5)]}, "stream 1 had no token before"),
        ({"prompts": [Deliveries()]}, "1 of 1 prompts had no token 5 s after the window"),
        ({"ended_s": 11.0}, "ended 1.0 s before its window"),
        ({"streams": [steady(12.1), Deliveries([1.0], [1000])]}, "stream 1 ended within"),
    ],
)
def test_a_phase_in_which_something_is_missing_has_no_figures(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        figures(plan(), record(**changes))


def test_a_record_survives_json_and_one_that_does_not_fit_is_refused() -> None:
    assert PhaseRecord.of_json(json.loads(json.dumps(record().as_json()))) == record()
    broken = record().as_json()
    broken["prompts"][0]["counts"].pop()
    with pytest.raises(ValueError, match="2 times for 1 deliveries"):
        PhaseRecord.of_json(broken)


# Clients.
