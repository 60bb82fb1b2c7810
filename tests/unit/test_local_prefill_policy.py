"""When a decode worker computes a short rest of a prompt itself: rule and measured costs."""

from __future__ import annotations

import pytest

from legato.cluster.policies import ASSUMED_LOCAL_FACTOR, PrefillCosts, prefills_locally
from legato.cluster.prefill_costs import FORGET_S, PrefillCostBook

COSTS = PrefillCosts(remote_overhead_s=0.010, remote_token_s=0.001, local_token_s=0.002)


def test_local_up_to_the_length_at_which_it_costs_as_much() -> None:
    # 2 ms a token here; 1 ms a token and 10 ms there: equal at 10 tokens.
    assert [n for n in range(1, 30) if prefills_locally(n, 0, COSTS, 128)] == list(range(1, 11))


def test_what_waits_at_the_prefill_worker_counts_for_the_local_way() -> None:
    assert not prefills_locally(20, 9, COSTS, 128)
    assert prefills_locally(20, 10, COSTS, 128)


def test_the_limit_holds_whatever_it_costs_and_0_is_off() -> None:
    assert prefills_locally(128, 10**6, COSTS, 128)
    assert not prefills_locally(129, 10**6, COSTS, 128)
    assert not any(prefills_locally(n, 10**6, COSTS, 0) for n in range(3))


def test_a_prompt_that_is_all_there_costs_its_last_token() -> None:
    dear = PrefillCosts(remote_overhead_s=0.0, remote_token_s=0.001, local_token_s=0.002)
    assert not prefills_locally(0, 0, dear, 128)
    assert prefills_locally(0, 1, dear, 128)


@pytest.mark.parametrize("unknown", ["remote_overhead_s", "remote_token_s"])
def test_what_was_not_measured_goes_the_remote_way(unknown: str) -> None:
    costs = {"remote_overhead_s": 9.0, "remote_token_s": 9.0, "local_token_s": 0.001}
    assert prefills_locally(1, 0, PrefillCosts(**costs), 128)
    assert not prefills_locally(1, 0, PrefillCosts(**{**costs, unknown: None}), 128)


def test_a_decode_worker_that_has_not_measured_is_taken_for_slow() -> None:
    costs = PrefillCosts(remote_overhead_s=0.009, remote_token_s=0.001, local_token_s=None)
    assert ASSUMED_LOCAL_FACTOR == 4.0
    assert prefills_locally(3, 0, costs, 128)
    assert not prefills_locally(4, 0, costs, 128)


def test_means_follow_what_is_measured_and_are_forgotten() -> None:
    now = 100.0
    book = PrefillCostBook(now=lambda: now)
    empty = PrefillCosts(remote_overhead_s=None, remote_token_s=None, local_token_s=None)
    assert book.costs(0.0) == empty
    book.note_prefill(25.0, 128)
    book.note_overhead(0.5)  # the first one is slow, as first ones are
    assert book.costs(0.007) == PrefillCosts(0.5, pytest.approx(25.0 / 128), 0.007)
    for _ in range(60):
        book.note_prefill(0.1, 100)
        book.note_overhead(0.010)
    costs = book.costs(0.0)
    assert costs.remote_overhead_s == pytest.approx(0.010, rel=0.01)
    assert costs.remote_token_s == pytest.approx(0.001, rel=0.01)
    now += FORGET_S
    assert book.costs(0.0).remote_overhead_s is not None
    now += 0.1
    assert book.costs(0.0).remote_overhead_s is None
    book.note_overhead(0.020)  # nothing of the forgotten one is in it
    assert book.costs(0.0).remote_overhead_s == 0.020
