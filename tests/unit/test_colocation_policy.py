"""Which requests go to a colocated worker, and to which."""

from __future__ import annotations

import pytest

from legato.cluster.colocation import one_answer, pick_colocated, prefers_colocated
from legato.cluster.policies import PREFILL_BACKLOG_TOKENS, Demand, PrefillCosts, WorkerSnapshot

DEMAND = Demand(prefill_tokens=100, decode_tokens=200)
# A hand-off of 0.1 s, 1 ms a token apart, 2 ms a token colocated.
COSTS = PrefillCosts(remote_overhead_s=0.1, remote_token_s=0.001, local_token_s=0.002)


def worker(name: str = "c", role: str = "colocated", **fields: object) -> WorkerSnapshot:
    settings = {"block_size": 10, "total_blocks": 100, "free_blocks": 100, **fields}
    return WorkerSnapshot(worker_id=name, role=role, **settings)  # type: ignore[arg-type]  # as named


PAIR = worker("p", "prefill"), worker("d", "decode")


def test_the_least_backlog_goes_first_then_the_most_free() -> None:
    busy, full = worker("a", backlog_tokens=5), worker("b", free_blocks=50)
    assert pick_colocated(DEMAND, [busy, full]) is full
    assert pick_colocated(DEMAND, [busy, full, worker("d"), worker("c")]) == worker("c")
    avoiding = Demand(100, 200, avoid=frozenset("b"))
    assert pick_colocated(avoiding, [busy, full]) is busy
    assert pick_colocated(avoiding, [full]) is full


def test_it_must_have_room_and_no_long_backlog() -> None:
    assert pick_colocated(DEMAND, [worker(free_blocks=10)]) is None  # 100 rows and the next one
    assert pick_colocated(DEMAND, [worker(free_blocks=11)]) is not None
    assert pick_colocated(Demand(100, 0), [worker(free_blocks=10)]) is not None  # ends with prefill
    assert pick_colocated(DEMAND, [worker(total_blocks=19)]) is None
    limit = PREFILL_BACKLOG_TOKENS - 100
    assert pick_colocated(DEMAND, [worker(backlog_tokens=limit + 1)]) is None
    assert pick_colocated(DEMAND, [worker(backlog_tokens=limit)]) is not None


def test_several_answers_ask_for_the_first_ones_room() -> None:
    several = Demand(100, 200, num_answers=10)
    assert pick_colocated(several, [worker()]) is None
    assert pick_colocated(one_answer(several), [worker()]) is not None


def test_where_no_pair_has_room_it_goes() -> None:
    assert prefers_colocated(DEMAND, worker(), None, PrefillCosts(None, None, None))


@pytest.mark.parametrize(
    ("num_tokens", "backlog", "apart_backlog", "goes"),
    [
        (99, 0, 0, True),  # 0.198 s against 0.199 s
        (101, 0, 0, False),
        (99, 2, 0, False),  # others wait there
        (101, 0, 3, True),  # or at the prefill worker
    ],
)
def test_else_where_its_first_step_costs_less(
    num_tokens: int, backlog: int, apart_backlog: int, *, goes: bool
) -> None:
    pair = worker("p", "prefill", backlog_tokens=apart_backlog), worker("d", "decode")
    colocated = worker(backlog_tokens=backlog)
    assert prefers_colocated(Demand(num_tokens, 200), colocated, pair, COSTS) is goes


def test_what_was_not_measured_goes_apart() -> None:
    for costs in (PrefillCosts(None, 0.001, 0.0001), PrefillCosts(0.1, None, 0.0001)):
        assert not prefers_colocated(DEMAND, worker(), PAIR, costs)
    # A colocated worker that knows nothing of itself counts as four times as dear.
    assert not prefers_colocated(Demand(34, 99), worker(), PAIR, PrefillCosts(0.1, 0.001, None))
    assert prefers_colocated(Demand(33, 99), worker(), PAIR, PrefillCosts(0.1, 0.001, None))


def test_one_token_needs_no_hand_off() -> None:
    single = Demand(10, 0)
    alone = worker("p", "prefill"), None
    assert not prefers_colocated(single, worker(), alone, COSTS)
    cheaper = PrefillCosts(None, 0.001, 0.0009)
    assert prefers_colocated(single, worker(), alone, cheaper)


def test_one_that_failed_there_goes_elsewhere() -> None:
    dear, cheap = PrefillCosts(0.1, 0.001, 1.0), PrefillCosts(0.1, 0.001, 1e-6)
    assert not prefers_colocated(Demand(9, 9, avoid=frozenset("c")), worker(), PAIR, cheap)
    assert prefers_colocated(Demand(9, 9, avoid=frozenset("d")), worker(), PAIR, dear)
    everywhere = frozenset("cd")
    assert prefers_colocated(Demand(9, 9, avoid=everywhere), worker(), PAIR, cheap)
    assert not prefers_colocated(Demand(9, 9, avoid=everywhere), worker(), PAIR, dear)
