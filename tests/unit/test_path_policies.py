"""Where KV does not get from one worker to another: the rules, and how long a path counts."""

from __future__ import annotations

import pytest

from legato.cluster.kv_paths import CLOSED_S, KvPaths
from legato.cluster.path_policies import (
    gives_up,
    is_cut_off,
    keeps_prefill,
    pick_pair,
    pick_reachable,
)
from legato.cluster.policies import PREFILL_BACKLOG_TOKENS, Demand, WorkerSnapshot

DEMAND = Demand(4, 8)


def prefill(name: str, backlog: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(name, "prefill", 1, 9000, 9000, backlog_tokens=backlog)


def decode(name: str, free: int = 100) -> WorkerSnapshot:
    return WorkerSnapshot(name, "decode", 1, 100, free)


@pytest.mark.parametrize(
    ("prefills", "decodes", "closed", "cut_off", "keeps"),
    [
        # Another decode worker is tried first.
        ("p", "de", "pd", False, True),
        ("pq", "de", "pd", False, True),
        ("pq", "def", "pd", False, True),
        # The second that is out of reach makes the prefill worker the suspect.
        ("pq", "de", "pd pe", True, False),
        ("pq", "def", "pd pe", True, False),
        ("pq", "d", "pd", True, False),
        # There is nobody else who reaches more.
        ("p", "def", "pd pe", True, True),
        ("p", "d", "pd", True, True),
        ("pq", "de", "pd pe qd qe", True, True),
        ("pq", "de", "pd pe qd", True, False),
        # Of workers that are gone nothing follows.
        ("pq", "e", "pd", False, True),
        ("pq", "", "pd", False, True),
    ],
)
def test_who_is_suspected_and_who_goes_on(
    prefills: str, decodes: str, closed: str, cut_off: bool, keeps: bool
) -> None:
    paths = frozenset((path[0], path[1]) for path in closed.split())
    assert is_cut_off("p", list(decodes), paths) == cut_off
    assert keeps_prefill("p", list(prefills), list(decodes), paths) == keeps


def test_a_request_ends_in_time() -> None:
    assert not gives_up(0.0, any_open=False)
    assert not gives_up(4.9, any_open=False)
    assert gives_up(5.0, any_open=False)
    assert not gives_up(9.9, any_open=True)
    assert gives_up(10.0, any_open=True)


@pytest.mark.parametrize(
    ("closed", "picked"),
    [
        ("", "pd"),
        ("pd", "pe"),  # the best prefill worker, and the next decode worker
        ("pd pe", "qd"),
        ("pd pe qd", "qe"),
        ("pd pe qd qe", None),
    ],
)
def test_the_best_pair_with_a_path(closed: str, picked: str | None) -> None:
    paths = frozenset((path[0], path[1]) for path in closed.split())
    prefills = [prefill("q", backlog=7), prefill("p")]
    decodes = [decode("e", free=50), decode("d")]
    pair = pick_pair(DEMAND, prefills, decodes, paths)
    assert (pair and pair[0].worker_id + pair[1].worker_id) == picked


def test_only_pairs_with_room() -> None:
    prefills = [prefill("p"), prefill("q", backlog=PREFILL_BACKLOG_TOKENS)]
    decodes = [decode("d"), decode("e", free=1)]
    assert pick_pair(DEMAND, prefills, decodes, frozenset({("p", "d")})) is None
    assert pick_reachable(DEMAND, "p", decodes, frozenset({("p", "d")})) is None
    assert pick_reachable(DEMAND, "p", decodes, frozenset({("q", "d")})) == decodes[0]


def test_a_path_is_closed_for_a_while_or_until_kv_passes() -> None:
    now = [100.0]
    paths = KvPaths(lambda: now[0])
    paths.failed(("p", "d"))
    now[0] += CLOSED_S - 1
    paths.failed(("p", "e"))
    assert paths.closed() == {("p", "d"), ("p", "e")}
    now[0] += 1
    assert paths.closed() == {("p", "e")}
    paths.failed(("p", "e"))  # counts anew
    now[0] += CLOSED_S - 1
    assert paths.closed() == {("p", "e")}
    paths.passed(("p", "e"))
    paths.passed(("q", "e"))
    assert paths.closed() == frozenset()
