"""Placement policies over snapshots."""

from __future__ import annotations

import pytest

from legato.cluster.policies import (
    BATCH_AGEING_S,
    PREFILL_BACKLOG_TOKENS,
    Demand,
    WorkerSnapshot,
    may_pass,
    pick_decode,
    pick_prefill,
    pick_to_drain,
    queue_rank,
)


def worker(
    name: str, *, total: int = 1000, free: int = 1000, backlog: int = 0, full: bool = False
) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=name,
        block_size=16,
        total_blocks=total,
        free_blocks=free,
        backlog_tokens=backlog,
        full=full,
    )


def name_of(picked: WorkerSnapshot | None) -> str | None:
    return picked.worker_id if picked is not None else None


def test_prefill_goes_to_the_least_backlog() -> None:
    demand = Demand(prefill_tokens=100, decode_tokens=0)
    picked = pick_prefill(demand, [worker("a", backlog=50), worker("b", backlog=10)])
    assert name_of(picked) == "b"


@pytest.mark.parametrize(
    ("backlog", "prompt", "taken"),
    [
        (PREFILL_BACKLOG_TOKENS - 100, 100, True),
        (PREFILL_BACKLOG_TOKENS - 100, 101, False),
        (0, PREFILL_BACKLOG_TOKENS * 3, True),  # a long prompt goes to an idle worker
        (1, PREFILL_BACKLOG_TOKENS, False),
    ],
)
def test_the_prefill_backlog_is_bounded(backlog: int, prompt: int, taken: bool) -> None:
    demand = Demand(prefill_tokens=prompt, decode_tokens=0)
    assert (pick_prefill(demand, [worker("a", backlog=backlog)]) is not None) is taken


@pytest.mark.parametrize(("tokens", "taken"), [(16, True), (32, True), (33, False)])
def test_blocks_round_up(tokens: int, taken: bool) -> None:
    demand = Demand(prefill_tokens=tokens, decode_tokens=tokens)
    assert (pick_prefill(demand, [worker("a", free=2)]) is not None) is taken
    assert (pick_decode(demand, [worker("a", free=2)]) is not None) is taken


def test_decode_goes_to_the_largest_free_share() -> None:
    workers = [worker("big", total=1000, free=500), worker("small", total=100, free=90)]
    assert name_of(pick_decode(Demand(1, 16), workers)) == "small"
    assert name_of(pick_decode(Demand(1, 100 * 16), workers)) == "big"  # only it can hold that


def test_a_worker_that_refused_is_full_and_an_avoided_one_is_the_last_choice() -> None:
    demand = Demand(1, 1, avoid=frozenset({"a"}))
    assert name_of(pick_decode(demand, [worker("a"), worker("b", free=1)])) == "b"
    assert name_of(pick_prefill(demand, [worker("a"), worker("b", backlog=9)])) == "b"
    assert name_of(pick_decode(demand, [worker("a"), worker("b", full=True)])) == "a"
    assert pick_decode(demand, [worker("b", full=True)]) is None


@pytest.mark.parametrize(
    ("blocked", "candidate", "passes"),
    [
        ((100, 200), (10, 20), True),
        ((100, 200), (100, 20), True),
        ((100, 200), (10, 200), True),
        ((100, 200), (100, 200), False),
        ((100, 200), (10, 201), False),
        ((100, 200), (101, 20), False),
    ],
)
def test_only_the_smaller_may_pass(
    blocked: tuple[int, int], candidate: tuple[int, int], passes: bool
) -> None:
    assert may_pass(Demand(*blocked), Demand(*candidate)) is passes


def test_the_worker_kept_free_is_large_enough_and_soonest_free() -> None:
    workers = [worker("a", total=10, free=10), worker("b", free=300), worker("c", free=400)]
    assert name_of(pick_to_drain(500 * 16, workers)) == "c"
    assert pick_to_drain(1001 * 16, workers) is None


def test_batch_stands_behind_interactive_until_it_has_aged() -> None:
    young = queue_rank(batch=True, waited_s=BATCH_AGEING_S - 0.1, arrival=1)
    aged = queue_rank(batch=True, waited_s=BATCH_AGEING_S, arrival=1)
    interactive = queue_rank(batch=False, waited_s=0.0, arrival=2)
    assert young > interactive > aged
