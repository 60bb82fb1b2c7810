"""The scheduler of prompts and the life of a sequence, alone: no tensor, no thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from legato.worker.kv.block_pool import BlockPool
from legato.worker.sampling_params import SamplingParams
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
        step = scheduler.schedule(0.0)
        assert plan(step) == parts
        assert step is not None
        scheduler.commit(step)
    assert scheduler.schedule(0.0) is None
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_waiting_tokens) == (0, 0, 0)


def test_a_prompt_starts_only_when_all_its_blocks_are_free_and_nobody_passes_it() -> None:
    pool = BlockPool(6)
    scheduler = PrefillScheduler(pool, 4, 16)
    first, big, small = sequence(12), sequence(16), sequence(4)
    for s in (first, big, small):
        scheduler.add(s)
    step = scheduler.schedule(0.0)
    assert plan(step) == [(12, 12, True)]
    assert step is not None
    scheduler.commit(step)
    assert first.state is SequenceState.DONE
    assert scheduler.schedule(0.0) is None  # 3 blocks are free, `big` needs 4, `small` waits behind
    assert pool.usage().held == 3
    assert first.lease is not None
    first.lease.release()
    assert plan(scheduler.schedule(0.0)) == [(16, 16, True)]


def test_prefill_removes_a_prompt_wherever_it_stands() -> None:
    pool = BlockPool(20)
    scheduler = PrefillScheduler(pool, 4, 8)
    started, waiting, kept = sequence(20), sequence(9), sequence(5)
    for s in (started, waiting, kept):
        scheduler.add(s)
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.commit(step)
    for s in (started, waiting):
        scheduler.remove(s)
        scheduler.remove(s)
    assert scheduler.num_waiting_tokens == 5
    assert started.lease is not None
    started.lease.release()
    assert pool.usage().free == 20
    assert plan(scheduler.schedule(0.0)) == [(5, 5, True)]


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


def test_each_answer_has_a_seed_of_its_own() -> None:
    params = replace(SamplingParams.greedy_for(3), seed=2**63 - 2)
    assert [params.for_answer(i).seed for i in range(4)] == [2**63 - 2, 2**63 - 1, 0, 1]
    assert params.for_answer(5) == replace(params, seed=3)
