"""Picks that know where a prompt's beginning lies, how quick workers are, and paths."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.cluster.learnt import Learnt
from legato.cluster.path_speeds import PathSpeeds
from legato.cluster.policies import (
    PREFILL_BACKLOG_TOKENS,
    Demand,
    Knowledge,
    WorkerSnapshot,
    pick_decode,
    pick_prefill,
)
from legato.cluster.prompt_hashes import PromptHashes
from legato.protos import worker_pb2

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role

PROMPT = Demand(prefill_tokens=1000, decode_tokens=1099)


def worker(name: str, role: Role, *, free: int = 1000, backlog: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(name, role, 16, 1000, free, backlog)


def prefills(**backlogs: int) -> list[WorkerSnapshot]:
    return [worker(name, "prefill", backlog=backlog) for name, backlog in backlogs.items()]


def picked(found: WorkerSnapshot | None) -> str | None:
    return found.worker_id if found is not None else None


def test_the_worker_that_holds_the_beginning_is_picked_up_to_what_computing_it_would_be() -> None:
    known = Knowledge(held={"b": 640})
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=639), known)) == "b"
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=641), known)) == "a"
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=1))) == "a"


def test_a_cached_prompt_fits_where_a_new_one_would_not() -> None:
    backlog = PREFILL_BACKLOG_TOKENS - 500
    assert pick_prefill(PROMPT, prefills(a=backlog)) is None
    known = Knowledge(held={"a": 640})
    assert picked(pick_prefill(PROMPT, prefills(a=backlog), known)) == "a"


def test_the_quicker_worker_is_picked_with_the_longer_backlog() -> None:
    known = Knowledge(prefill_tokens_s={"a": 1000.0, "b": 4000.0})
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=2500), known)) == "b"
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=3050), known)) == "a"


def test_a_slow_path_to_the_decode_worker_counts_as_the_time_that_it_takes() -> None:
    known = Knowledge(
        prefill_tokens_s={"a": 1000.0, "b": 1000.0},
        path_rows_s={("a", "d"): 500.0, ("b", "d"): 5000.0},
    )
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=1700), known, "d")) == "b"
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=1900), known, "d")) == "a"
    reused = replace(known, held={"d": 1000})  # nothing is sent
    assert picked(pick_prefill(PROMPT, prefills(a=0, b=100), reused, "d")) == "a"


def test_decode_goes_where_fewer_rows_are_to_be_sent_unless_that_worker_is_fuller() -> None:
    known = Knowledge(held={"e": 800}, expected_output=100)  # 50 blocks
    emptier, holder = worker("d", "decode", free=500), worker("e", "decode", free=451)
    assert picked(pick_decode(PROMPT, [emptier, holder], known)) == "e"
    assert picked(pick_decode(PROMPT, [emptier, replace(holder, free_blocks=449)], known)) == "d"


def test_expected_growth_weighs_more_on_a_small_worker() -> None:
    small, large = worker("a", "decode", free=300), worker("b", "decode", free=2900)
    small, large = replace(small, total_blocks=300), replace(large, total_blocks=3000)
    demand = Demand(prefill_tokens=160, decode_tokens=1600)
    assert picked(pick_decode(demand, [small, large])) == "a"
    grows = Knowledge(expected_output=1400)
    assert picked(pick_decode(demand, [small, large], grows)) == "b"


NAMES = ("a", "b", "c")
SNAPSHOTS = st.tuples(
    *(
        st.builds(
            WorkerSnapshot,
            worker_id=st.just(name),
            role=st.just("prefill"),
            block_size=st.just(16),
            total_blocks=st.integers(1, 300),
            free_blocks=st.integers(0, 300),
            backlog_tokens=st.integers(0, 5000),
            full=st.booleans(),
        )
        for name in NAMES
    )
)
KNOWN = st.builds(
    Knowledge,
    held=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5000)),
    prefill_tokens_s=st.dictionaries(st.sampled_from(NAMES), st.floats(1, 1e6)),
    path_rows_s=st.dictionaries(st.tuples(st.sampled_from(NAMES), st.just("d")), st.floats(1, 1e6)),
    expected_output=st.integers(0, 1000),
)
DEMANDS = st.builds(
    Demand,
    prefill_tokens=st.integers(1, 4000),
    decode_tokens=st.integers(1, 6000),
    avoid=st.frozensets(st.sampled_from(NAMES)),
)


@settings(deadline=None)
@given(DEMANDS, SNAPSHOTS, KNOWN, st.sampled_from([None, "d"]))
def test_no_pick_is_without_room_and_each_is_the_same_in_any_order(
    demand: Demand, workers: tuple[WorkerSnapshot, ...], known: Knowledge, decode: str | None
) -> None:
    decodes = tuple(replace(w, role="decode") for w in workers)
    for found, other in (
        (
            pick_prefill(demand, workers, known, decode),
            pick_prefill(demand, reversed(workers), known, decode),
        ),
        (pick_decode(demand, decodes, known), pick_decode(demand, reversed(decodes), known)),
    ):
        assert found == other
        assert found is None or found.can_hold_now(demand)
    fits = [w for w in decodes if w.can_hold_now(demand)]
    assert (pick_decode(demand, decodes, known) is None) == (not fits)


@settings(deadline=None)
@given(DEMANDS, SNAPSHOTS, KNOWN, st.integers(0, 2000))
def test_less_load_or_more_of_the_prompt_never_loses_a_worker_its_pick(
    demand: Demand, workers: tuple[WorkerSnapshot, ...], known: Knowledge, change: int
) -> None:
    found = pick_prefill(demand, workers, known, "d")
    if found is None:
        return
    name = found.worker_id
    lighter = replace(found, backlog_tokens=max(0, found.backlog_tokens - change))
    others = [w for w in workers if w is not found]
    assert picked(pick_prefill(demand, [*others, lighter], known, "d")) == name
    more = replace(known, held={**known.held, name: known.held.get(name, 0) + change})
    assert picked(pick_prefill(demand, workers, more, "d")) == name


def hit_share(*, aware: bool) -> float:
    """Of the prompt tokens of 4 tenants on 2 prefill workers, those that were there. Each worker
    has room for the prefixes of two tenants; tenants come by chance.
    """
    dice = random.Random(5)
    prefix, room = 800, 2
    cached: dict[str, list[int]] = {"a": [], "b": []}  # tenants, the last used last
    backlog = {"a": 0, "b": 0}
    hits = total = 0
    for _ in range(600):
        tenant = dice.randrange(4)
        held = {w: prefix * (tenant in cached[w]) for w in cached}
        known = Knowledge(held=held) if aware else Knowledge()
        name = picked(pick_prefill(PROMPT, prefills(**backlog), known))
        assert name is not None
        hits, total = hits + held[name], total + PROMPT.prefill_tokens
        backlog[name] += PROMPT.prefill_tokens - held[name]
        others = [t for t in cached[name] if t != tenant]
        cached[name] = [*others[-(room - 1) :], tenant]
        for w in backlog:  # both compute until the next arrival
            backlog[w] = max(0, backlog[w] - 600)
    return hits / total


def test_tenants_find_their_prefix_again() -> None:
    aware, blind = hit_share(aware=True), hit_share(aware=False)
    print(f"of the prompt tokens {aware:.2f} were cached, without knowledge {blind:.2f}")
    assert aware > 0.6
    assert aware > 1.3 * blind


def test_paths_are_measured_without_what_prefill_took() -> None:
    paths = PathSpeeds(lambda: 0.0)
    done = worker_pb2.HandoffDone(kv_bytes=1 << 20, transfer_s=1.5, reused_tokens=100)
    paths.note(("p", "d"), done, 1100, model_s=0.5)
    assert paths.rows_s() == {("p", "d"): 1000.0}
    paths.note(("p", "e"), worker_pb2.HandoffDone(kv_bytes=10, transfer_s=1.0), 5, model_s=0.0)
    paths.note(("p", "f"), done, 100, model_s=0.0)  # all was there
    assert paths.rows_s().keys() == {("p", "d")}
    paths.forget("d")
    assert paths.rows_s() == {}


def test_what_a_long_prompt_costs_the_router() -> None:
    """Printed; held to a bound only that a busy machine keeps as well."""
    learnt, token_ids = Learnt(), list(range(2048))
    identity = worker_pb2.WorkerIdentity(
        model_fingerprint="m", weights="w", kv_layout=worker_pb2.KvLayout(block_size=16, dtype="f")
    )
    hashes = PromptHashes(token_ids, "").of(identity)
    views = [SimpleNamespace(worker_id=f"w{i}", identity=identity) for i in range(16)]
    for view in views:
        changes = worker_pb2.PrefixChanges(reset=True, added=hashes)
        learnt.prefixes.note(view.worker_id, changes)
    spent_s = []
    for _ in range(50):
        began_s = time.perf_counter()
        known = learnt.about(PromptHashes(token_ids, ""), views, 100)  # type: ignore[arg-type]  # what it looks at
        spent_s.append(time.perf_counter() - began_s)
    assert known.held == {view.worker_id: 2048 for view in views}
    print(f"{1000 * min(spent_s):.3f} ms for 2,048 tokens and 16 workers that hold them")
    assert min(spent_s) < 0.005
