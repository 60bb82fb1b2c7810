"""admit: who may wait, by what waits before and what was measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import grpc
import pytest

from legato.cluster.admit_gate import refused
from legato.cluster.admit_policy import (
    AGED_SHARE,
    Applicant,
    Pace,
    QueueLimits,
    QueueSnapshot,
    Work,
    admit,
    estimate_wait_s,
    give_up,
    pick_to_displace,
)
from legato.cluster.error_reasons import Reason
from legato.cluster.policies import BATCH_AGEING_S

LIMITS = QueueLimits(requests=10, tokens=10_000)
PACE = Pace(
    drain_tokens_s=500.0,
    start_s=0.2,
    output_token_s=0.01,
)
OWN = Applicant(Work(1, 50, 100), longest_output=101, batch=False, left_s=10.0)


def queue(requests: int, tokens: int, *, batch: int = 0) -> QueueSnapshot:
    """So many requests and tokens in all; of the requests, so many are batch ones of 100 tokens."""
    rest = requests - batch
    return QueueSnapshot(
        interactive=Work(rest, 0, tokens - 100 * batch), batch=Work(batch, 0, 100 * batch)
    )


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    assert admit(replace(OWN, work=Work(1, 10**6, 10**6)), QueueSnapshot(), LIMITS, Pace()) is None


@pytest.mark.parametrize(
    ("requests", "tokens", "limit"),
    [
        (9, 900, None),
        (10, 900, "10 requests wait (limit 10)"),
        (3, 9850, None),
        (3, 9851, "50 prompt tokens and 9951 expected ones would wait (limit 10000)"),
    ],
)
def test_the_queue_is_bounded_in_requests_and_tokens(
    requests: int, tokens: int, limit: str | None
) -> None:
    refusal = admit(OWN, queue(requests, tokens), LIMITS, Pace())
    assert (refusal is None) == (limit is None)
    if refusal is not None and limit is not None:
        assert limit in refusal.reason
        assert refusal.retry_s is not None
        assert refusal.retry_s > 0


def test_a_deadline_that_cannot_be_met_is_refused_with_both_numbers() -> None:
    # 2 s in the queue and 1.2 s of service, and as much again for the estimate's error.
    waiting = queue(2, 1000)
    assert admit(replace(OWN, left_s=6.41), waiting, LIMITS, PACE) is None
    refusal = admit(replace(OWN, left_s=2.0), waiting, LIMITS, PACE)
    assert refusal is not None
    assert "2 s are left" in refusal.reason
    assert "about 3.2 s are needed, 2 s of them in the queue" in refusal.reason
    assert refusal.retry_s == pytest.approx(4.4)


def test_a_deadline_too_short_for_what_is_asked_has_no_hint() -> None:
    quiet = replace(PACE, drain_tokens_s=None)
    refusal = admit(replace(OWN, left_s=1.0), QueueSnapshot(), LIMITS, quiet)
    assert refusal is not None
    assert refusal.reason == (
        "its deadline is too short for what is asked: 1 s are given, and about 1.2 s are needed, "
        "with nobody waiting before it"
    )
    assert refusal.retry_s is None
    error = refused(refusal)
    assert (error.code, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None)
    assert error.reason is Reason.DEADLINE_TOO_SHORT
    assert "try again" not in error.message
    for queued, pace in ((queue(2, 1000), quiet), (QueueSnapshot(), PACE)):
        crowded = admit(replace(OWN, left_s=1.0), queued, LIMITS, pace)
        assert crowded is not None
        assert crowded.retry_s is not None, "a full service's pace is no fact of tomorrow"


def test_what_was_not_measured_refuses_nobody() -> None:
    assert admit(replace(OWN, left_s=0.01), queue(5, 5000), LIMITS, Pace()) is None


def test_batch_requests_have_what_interactive_ones_leave() -> None:
    batch, waiting = replace(OWN, batch=True), Work(1, 0, 100)
    own = batch.work.tokens
    idle, busy = (replace(PACE, offered_tokens_s=rate) for rate in (0.0, 400.0))
    assert estimate_wait_s(batch, waiting, idle) == pytest.approx(0.2)
    assert estimate_wait_s(batch, Work(), idle) == pytest.approx(0.0)
    assert estimate_wait_s(batch, waiting, busy) == pytest.approx(1.0 + own / 100.0 - own / 500.0)
    # Nobody waits, and still others will take the next places.
    assert estimate_wait_s(batch, Work(), busy) == pytest.approx(own / 100.0 - own / 500.0)
    flooded = replace(PACE, offered_tokens_s=2000.0)
    aged_s = BATCH_AGEING_S + (100 + own) / (AGED_SHARE * 500.0)
    assert estimate_wait_s(batch, waiting, flooded) == pytest.approx(aged_s - own / 500.0)
    seen = replace(flooded, batch_tokens_s=250.0)
    assert estimate_wait_s(batch, waiting, seen) == pytest.approx((100 + own) / 250.0 - own / 500.0)
    assert estimate_wait_s(OWN, waiting, flooded) == pytest.approx(0.2)


def test_who_waits_is_given_up_only_when_even_a_quick_queue_is_too_slow() -> None:
    ahead = Work(4, 0, 1000)  # 2 s
    assert give_up(replace(OWN, left_s=2.3), ahead, PACE) is None
    assert give_up(replace(OWN, left_s=2.1), ahead, PACE) is not None
    assert give_up(replace(OWN, left_s=1.1), Work(), PACE) is not None


def test_batch_requests_give_way_to_an_interactive_one_and_no_more_than_needed() -> None:
    batch = [Work(1, 0, 100)] * 4
    assert pick_to_displace(OWN, queue(9, 900, batch=4), batch, LIMITS) == 0
    assert pick_to_displace(OWN, queue(10, 1000, batch=4), batch, LIMITS) == 1
    assert pick_to_displace(OWN, queue(8, 10_000, batch=4), batch, LIMITS) == 2


def test_more_before_it_or_less_time_never_lets_a_request_in() -> None:
    """Monotone in all that speaks against it."""
    loads, times = (0, 1, 5, 9, 10), (0.5, 1.5, 3.0, 6.0, 60.0)
    for batch, (n, more), (left, less) in itertools.product(
        (False, True), itertools.pairwise(loads), itertools.pairwise(times)
    ):
        own = replace(OWN, batch=batch, left_s=left)
        if admit(own, queue(n, 400 * n), LIMITS, PACE) is not None:
            assert admit(own, queue(more, 400 * more), LIMITS, PACE) is not None
        if admit(replace(own, left_s=less), queue(n, 400 * n), LIMITS, PACE) is not None:
            assert admit(own, queue(n, 400 * n), LIMITS, PACE) is not None
