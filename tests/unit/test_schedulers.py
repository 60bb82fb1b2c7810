"""The two schedulers, alone: no tensor, no thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.decode import DecodeScheduler
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.sequence import FinishReason, Sequence, SequenceState

if TYPE_CHECKING:
    from legato.worker.scheduling.step import Step


def sequence(
    num_tokens: int, *, max_tokens: int = 4, min_tokens: int = 0, stop: frozenset[int] = frozenset()
) -> Sequence:
    params = replace(
        SamplingParams.greedy_for(max_tokens), min_tokens=min_tokens, stop_token_ids=stop
    )
    return Sequence(list(range(num_tokens)), num_tokens, params, frozenset({99}))


def plan(step: Step | None) -> list[tuple[int, int, bool]]:
    """(tokens of the sequence, new ones, whether it samples) a part."""
    assert step is not None
    return [(len(p.sequence.token_ids), p.num_tokens, p.samples) for p in step.parts]


def test_prefill_packs_prompts_and_cuts_the_last_one_at_the_budget() -> None:
    scheduler = PrefillScheduler(BlockPool(100), 4, 16)
    for length in (5, 7, 30, 3):
        scheduler.add(sequence(length))
    assert scheduler.num_waiting_tokens == 45
    expected = [
        [(5, 5, True), (7, 7, True), (30, 4, False)],
        [(30, 16, False)],
        [(30, 10, True), (3, 3, True)],
    ]
    for parts in expected:
        step = scheduler.schedule()
        assert plan(step) == parts
        assert step is not None
        scheduler.commit(step)
    assert scheduler.schedule() is None
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_waiting_tokens) == (0, 0, 0)


def test_a_prompt_starts_only_when_all_its_blocks_are_free_and_nobody_passes_it() -> None:
    pool = BlockPool(6)
    scheduler = PrefillScheduler(pool, 4, 16)
    first, big, small = sequence(12), sequence(16), sequence(4)
    for s in (first, big, small):
        scheduler.add(s)
    step = scheduler.schedule()
    assert plan(step) == [(12, 12, True)]
    assert step is not None
    scheduler.commit(step)
    assert first.state is SequenceState.DONE
    assert scheduler.schedule() is None  # 3 blocks are free, `big` needs 4, `small` waits behind
    assert pool.usage().held == 3
    assert first.lease is not None
    first.lease.release()
    assert plan(scheduler.schedule()) == [(16, 16, True)]


def test_prefill_removes_a_prompt_wherever_it_stands() -> None:
    pool = BlockPool(20)
    scheduler = PrefillScheduler(pool, 4, 8)
    started, waiting, kept = sequence(20), sequence(9), sequence(5)
    for s in (started, waiting, kept):
        scheduler.add(s)
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step)
    for s in (started, waiting):
        scheduler.remove(s)
        scheduler.remove(s)
    assert scheduler.num_waiting_tokens == 5
    assert started.lease is not None
    started.lease.release()
    assert pool.usage().free == 20
    assert plan(scheduler.schedule()) == [(5, 5, True)]


def landed(pool: BlockPool, num_tokens: int) -> Sequence:
    s = sequence(num_tokens)
    s.num_computed = num_tokens - 1
    s.lease = BlockLease(pool, pool.allocate(4) or [])
    return s


def test_decode_runs_all_that_joined_and_lets_the_rest_wait_in_order() -> None:
    pool = BlockPool(20)
    scheduler = DecodeScheduler(4, 2)
    assert scheduler.schedule() is None
    a, b, c = (landed(pool, n) for n in (5, 6, 7))
    for s in (a, b, c):
        scheduler.add(s)
    step = scheduler.schedule()
    assert plan(step) == [(5, 1, True), (6, 1, True)]
    assert step is not None
    assert step.joined == [a, b]
    scheduler.commit(step)
    assert (a.num_computed, scheduler.num_waiting, scheduler.num_running) == (5, 1, 2)
    a.append(1)
    b.append(1)
    scheduler.remove(a)
    step = scheduler.schedule()
    assert plan(step) == [(7, 1, True), (7, 1, True)]
    assert step is not None
    assert step.joined == [c]


def test_decode_pins_blocks_for_as_long_as_the_sequence_is_in_the_batch() -> None:
    pool = BlockPool(4)
    scheduler = DecodeScheduler(4, 2)
    s = landed(pool, 5)
    scheduler.add(s)
    scheduler.schedule()
    assert s.lease is not None
    s.lease.release()
    assert pool.usage().held == 4
    scheduler.remove(s)
    assert pool.usage().held == 0


def test_the_end_is_decided_by_token_and_count() -> None:
    plain = sequence(3, max_tokens=2)
    assert plain.append(5) is None
    assert plain.append(99) is FinishReason.STOP
    assert sequence(3, max_tokens=1).append(5) is FinishReason.LENGTH
    assert sequence(3, stop=frozenset({7})).append(7) is FinishReason.STOP
    held = sequence(3, min_tokens=1, stop=frozenset({7}))
    assert held.banned_token_ids == {7, 99}
    assert held.append(7) is None
    assert held.banned_token_ids == frozenset()
    assert held.append(7) is FinishReason.STOP


def test_a_sequence_never_moves_back() -> None:
    s = sequence(3)
    s.move_to(SequenceState.DONE)
    with pytest.raises(AssertionError, match="cannot become"):
        s.move_to(SequenceState.RUNNING)
