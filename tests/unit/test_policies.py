"""Placement policies over snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING

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
from legato.worker.kv.block_pool import BlockPool
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.claim import AdmissionRule, NeverFitsError, Newcomer

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


def worker(
    name: str,
    role: Role = "decode",
    *,
    total: int = 1000,
    free: int = 1000,
    backlog: int = 0,
    full: bool = False,
    refused: tuple[Demand, ...] = (),
) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=name,
        role=role,
        block_size=16,
        total_blocks=total,
        free_blocks=free,
        backlog_tokens=backlog,
        full=full,
        refused=refused,
    )


def name_of(picked: WorkerSnapshot | None) -> str | None:
    return picked.worker_id if picked is not None else None


def test_prefill_goes_to_the_least_backlog() -> None:
    demand = Demand(prefill_tokens=100, decode_tokens=0)
    workers = [worker("a", "prefill", backlog=50), worker("b", "prefill", backlog=10)]
    assert name_of(pick_prefill(demand, workers)) == "b"


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
    picked = pick_prefill(demand, [worker("a", "prefill", backlog=backlog)])
    assert (picked is not None) is taken


@pytest.mark.parametrize(("tokens", "taken"), [(16, True), (32, True), (33, False)])
def test_prefill_needs_blocks_for_the_prompt(tokens: int, taken: bool) -> None:
    demand = Demand(prefill_tokens=tokens, decode_tokens=tokens + 10)
    assert (pick_prefill(demand, [worker("a", "prefill", free=2)]) is not None) is taken


@pytest.mark.parametrize(("tokens", "taken"), [(15, True), (31, True), (32, False)])
def test_decode_needs_blocks_for_the_hand_off_and_one_row_to_begin(
    tokens: int, taken: bool
) -> None:
    demand = Demand(prefill_tokens=tokens, decode_tokens=16 * 1000)
    assert (pick_decode(demand, [worker("a", free=2)]) is not None) is taken
    too_long = Demand(prefill_tokens=tokens, decode_tokens=16 * 1000 + 1)
    assert pick_decode(too_long, [worker("a")]) is None


@pytest.mark.parametrize(
    ("prompt", "end", "num_answers", "now", "at_end"),
    [
        (40, 100, 1, 3, 7),
        (40, 100, 3, 2 + 3 * 1, 2 + 3 * 5),  # two full blocks are shared
        (48, 100, 3, 3 + 3 * 1, 3 + 3 * 4),
        (47, 48, 2, 2 + 2 * 1, 2 + 2 * 1),
        (5, 6, 128, 128, 128),
    ],
)
def test_answers_share_the_full_blocks_of_their_prompt(
    prompt: int, end: int, num_answers: int, now: int, at_end: int
) -> None:
    demand = Demand(prompt, end, num_answers)
    assert worker("a").blocks_now(demand) == now
    assert worker("a").blocks_at_end(demand) == at_end
    assert worker("a", "prefill").blocks_now(demand) == -(-prompt // 16)
    # The worker's own count, which decides in the end.
    newcomer = Newcomer(
        rows=prompt, max_rows=end, max_tokens=end - prompt + 1, num_answers=num_answers
    )
    ledger = CapacityLedger(BlockPool(1000), 16, AdmissionRule())
    assert ledger.blocks_to_enter(newcomer) == now
    for total in (at_end - 1, at_end):
        small = CapacityLedger(BlockPool(total), 16, AdmissionRule())
        with contextlib.nullcontext() if total == at_end else pytest.raises(NeverFitsError):
            small.check_can_fit(newcomer)
        assert worker("a", total=total).can_ever_hold(demand) is (total == at_end)


def test_decode_goes_to_the_largest_free_share() -> None:
    workers = [worker("big", total=1000, free=500), worker("small", total=100, free=90)]
    assert name_of(pick_decode(Demand(1, 16), workers)) == "small"
    assert name_of(pick_decode(Demand(100 * 16, 101 * 16), workers)) == "big"  # only it can


def test_a_worker_that_failed_is_full_and_an_avoided_one_is_the_last_choice() -> None:
    demand = Demand(1, 2, avoid=frozenset({"a"}))
    assert name_of(pick_decode(demand, [worker("a"), worker("b", free=1)])) == "b"
    prefills = [worker("a", "prefill"), worker("b", "prefill", backlog=9)]
    assert name_of(pick_prefill(demand, prefills)) == "b"
    assert name_of(pick_decode(demand, [worker("a"), worker("b", full=True)])) == "a"
    assert pick_decode(demand, [worker("b", full=True)]) is None


REFUSED = Demand(prefill_tokens=160, decode_tokens=800)


@pytest.mark.parametrize(
    ("demand", "asked"),
    [
        (Demand(160, 800), False),
        (Demand(161, 799), False),  # the same in blocks
        (Demand(400, 900), False),
        (Demand(160, 800, batch=True), False),
        (Demand(160, 784), True),
        (Demand(150, 800), True),
        (Demand(400, 700), True),  # more now, less to come: the worker may think otherwise
        (Demand(100, 800, num_answers=2), True),  # 8 blocks now; 11 were refused
        (Demand(160, 800, num_answers=2), False),
    ],
)
def test_a_refusal_answers_those_that_ask_for_no_less(demand: Demand, asked: bool) -> None:
    assert worker("a", refused=(REFUSED,)).can_hold_now(demand) is asked


def test_of_refusals_only_the_least_are_kept() -> None:
    more, less = Demand(176, 900), Demand(100, 100)
    other, batch = Demand(16, 1600), Demand(16, 16, batch=True)
    same = Demand(161, 799)  # in blocks
    for order in itertools.permutations((REFUSED, more, less, other, batch)):
        assert set(worker("a").least_of(order)) == {less, other, batch}
    assert worker("a").least_of((REFUSED, same)) == [REFUSED]


def test_what_was_refused_of_late_asks_one_by_one() -> None:
    more, less = Demand(176, 800), Demand(100, 100)
    for demand, asking, asked in (
        (more, (), True),
        (more, (REFUSED,), False),
        (more, (less,), False),  # refused to the lesser, it is refused to both
        (more, (Demand(400, 900),), True),
        (less, (less,), True),
    ):
        snapshot = dataclasses.replace(worker("a"), doubtful=(REFUSED,), asking=asking)
        assert snapshot.can_hold_now(demand) is asked
    assert dataclasses.replace(worker("a"), asking=(less,)).can_hold_now(more)


def test_a_refused_batch_request_says_nothing_of_interactive_ones() -> None:
    refused = Demand(160, 800, batch=True)
    assert worker("a", refused=(refused,)).can_hold_now(Demand(160, 800))
    assert not worker("a", refused=(refused,)).can_hold_now(Demand(160, 800, batch=True))


@pytest.mark.parametrize(
    ("blocked", "candidate", "passes"),
    [
        ((100, 200), (10, 20), True),
        ((100, 200), (100, 20), True),
        ((100, 200), (10, 200), True),
        ((100, 200), (100, 200), False),
        ((100, 200), (10, 201), False),
        ((100, 200), (101, 20), False),
        ((100, 200), (10, 100, 2), True),
        ((100, 200), (10, 101, 2), False),  # two answers of 101 rows
        ((100, 100, 2), (10, 200), True),
    ],
)
def test_only_the_smaller_may_pass(
    blocked: tuple[int, ...], candidate: tuple[int, ...], passes: bool
) -> None:
    assert may_pass(Demand(*blocked), Demand(*candidate)) is passes


def test_the_worker_kept_free_is_large_enough_and_soonest_free() -> None:
    workers = [worker("a", total=10, free=10), worker("b", free=300), worker("c", free=400)]
    assert name_of(pick_to_drain(Demand(1, 500 * 16), workers)) == "c"
    assert pick_to_drain(Demand(1, 1001 * 16), workers) is None


def test_batch_stands_behind_interactive_until_it_has_aged() -> None:
    young = queue_rank(batch=True, waited_s=BATCH_AGEING_S - 0.1, arrival=1)
    aged = queue_rank(batch=True, waited_s=BATCH_AGEING_S, arrival=1)
    interactive = queue_rank(batch=False, waited_s=0.0, arrival=2)
    assert young > interactive > aged
