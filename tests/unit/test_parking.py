"""Sequences that leave the batch to be moved, in the scheduler alone."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench, parts, victims

from legato.worker.scheduling.live import claim_of, lease_of
from legato.worker.sequence import SequenceState


def test_a_parked_one_keeps_its_blocks_and_is_in_no_step_until_it_resumes() -> None:
    bench = Bench(20)
    first, second = bench.join(7, 20), bench.join(7, 20)
    bench.steps(2)
    bench.scheduler.park(first, 3)
    assert bench.scheduler.take_parked() == []
    assert parts(bench.step()) == [second]
    assert bench.scheduler.take_parked() == [(first, 3)]
    assert bench.scheduler.take_parked() == [], "once"
    blocks, rows = list(lease_of(first).blocks), first.num_computed
    assert rows == len(first.token_ids) - 1
    bench.steps(5)
    assert (lease_of(first).blocks, first.num_computed) == (blocks, rows)
    assert bench.scheduler.num_running == 2, "its load counts"
    bench.scheduler.resume(first)
    assert set(parts(bench.step())) == {first, second}
    for sequence in (first, second):
        bench.end(sequence)
    assert bench.pool.usage().held == 0
    assert len(bench.ledger) == 0


def test_it_is_told_when_the_device_is_done_with_what_was_under_way() -> None:
    bench = Bench(20)
    first, second = bench.join(7, 20), bench.join(7, 20)
    bench.steps(1)
    under_way = bench.scheduler.schedule(0.0)
    assert under_way is not None
    bench.scheduler.commit(under_way)
    for sequence in (first, second):
        sequence.num_unread += 1
    bench.scheduler.park(first, 1)
    following = bench.scheduler.schedule(0.0)
    assert following is not None
    assert parts(following) == [second]
    assert bench.scheduler.take_parked() == []
    bench.scheduler.commit(following)
    bench.scheduler.settle(under_way)
    assert bench.scheduler.take_parked() == [(first, 1)]


@pytest.mark.parametrize("state", ["wanted", "parked", "told", "resumed"])
def test_one_that_ends_on_the_way_leaves_nothing(state: str) -> None:
    bench = Bench(20)
    sequence = bench.join(7, 20)
    bench.steps(2)
    bench.scheduler.park(sequence, 1)
    if state != "wanted":
        assert bench.scheduler.schedule(0.0) is None
        assert sequence.state is SequenceState.PARKED
    if state in ("told", "resumed"):
        assert bench.scheduler.take_parked() == [(sequence, 1)]
    if state == "resumed":
        bench.scheduler.resume(sequence)
    bench.end(sequence)
    assert bench.scheduler.take_parked() == []
    assert bench.pool.usage().held == 0
    assert len(bench.ledger) == 0
    bench.scheduler.park(sequence, 2)  # the word crosses its end
    assert bench.scheduler.schedule(0.0) is None
    assert bench.scheduler.take_parked() == []


def test_a_parked_one_is_no_victim_and_a_swapped_one_is_parked_when_it_is_back() -> None:
    bench = Bench(6, num_slots=8)
    first, second = bench.join(7, 18), bench.join(7, 18)
    bench.steps(1)
    bench.scheduler.park(second, 1)
    bench.step()
    assert bench.scheduler.take_parked() == [(second, 1)]
    bench.steps(7)  # 16 rows, and all the blocks that the other has left
    assert second.state is SequenceState.PARKED
    bench.scheduler.resume(second)
    assert victims(bench.steps(1)) == [second]
    bench.scheduler.park(second, 2)
    bench.steps(2)
    assert second.state is SequenceState.SWAPPED
    bench.end(first)
    bench.steps(1)
    assert bench.scheduler.schedule(0.0) is None
    assert bench.scheduler.take_parked() == [(second, 2)]
    assert claim_of(second).num_preemptions == 1


def test_one_whose_prompt_is_computed_here_is_parked_behind_it() -> None:
    bench = Bench(30)
    sequence = bench.begin(70, 20)
    bench.scheduler.park(sequence, 1)
    num_steps = 0
    while sequence.num_computed < 70:
        bench.step()
        num_steps += 1
        assert bench.scheduler.take_parked() == []
    assert num_steps > 1
    assert bench.scheduler.schedule(0.0) is None
    assert bench.scheduler.take_parked() == [(sequence, 1)]
