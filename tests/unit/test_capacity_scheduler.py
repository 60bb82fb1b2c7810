"""The decode scheduler that preempts, alone: no tensor, no thread, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_bench import BATCH, Bench, parts, victims

from legato.worker.kv.block_lease import BlockLease
from legato.worker.priority import Priority
from legato.worker.scheduling.capacity_decode import BATCH_AGEING_S
from legato.worker.scheduling.claim import AdmissionMode, Newcomer
from legato.worker.scheduling.live import claim_of, lease_of
from legato.worker.sequence import FinishReason, Sequence, SequenceState

if TYPE_CHECKING:
    from legato.worker.scheduling.decision import Decision


def test_a_block_is_taken_when_a_row_needs_it_and_not_before() -> None:
    bench = Bench(8)
    bench.join(3, 12)
    held = []
    for _ in range(10):
        bench.step()
        held.append(bench.pool.usage().held)
    assert held == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]  # rows 4, 5, ... 13


def test_the_newest_of_the_lowest_priority_yields_and_the_others_go_on() -> None:
    bench = Bench(8, num_slots=8)
    old_batch = bench.join(7, 20, BATCH)
    old = bench.join(7, 20)
    new_batch = bench.join(7, 20, BATCH)
    new = bench.join(7, 20)
    decision = bench.steps(2)[1]  # each is at its 9th row, and there are no more blocks
    # 4 blocks are wanted: the first victim gives 2 and wants none, and then 1 is still short.
    assert [out.sequence for out in decision.swap_outs] == [new_batch, old_batch]
    assert set(parts(decision)) == {old, new}
    assert victims(bench.steps(7)) == []
    assert victims(bench.steps(1)) == [new]  # its 17th row and the other's: 10 blocks


def test_what_a_victim_gives_is_held_until_settled() -> None:
    bench = Bench(6, num_slots=8)
    first, second = bench.join(7, 16), bench.join(15, 8)
    bench.steps(1)
    decision = bench.scheduler.schedule(0.0)
    assert decision is not None
    assert victims([decision]) == [second]
    [out] = decision.swap_outs
    assert len(out.blocks) == 4
    assert first.lease is not None
    assert first.lease.blocks[-1] in out.blocks  # given out in the same decision
    assert bench.pool.usage().available == 0
    bench.scheduler.commit(decision)
    bench.scheduler.settle(decision)
    assert bench.pool.usage().available == 3


def test_a_victims_block_that_is_given_out_is_not_found_by_its_hash_any_more() -> None:
    bench = Bench(6, num_slots=8)
    first, second = bench.join(7, 16), bench.join(15, 8)
    assert first.lease is not None
    assert second.lease is not None
    bench.step()
    hashes = [b"%d" % place for place in range(4)]
    for block, block_hash in zip(second.lease.blocks, hashes, strict=True):
        assert bench.pool.register(block, block_hash)
    [out] = bench.step().swap_outs
    given = first.lease.blocks[-1]
    assert given in out.blocks
    assert bench.pool.is_writable(given)
    found = bench.pool.count_cached_prefix(hashes)
    assert 0 < found == out.blocks.index(given) < 4


def test_one_comes_back_into_other_blocks_in_order_and_its_slots_are_free_again() -> None:
    bench = Bench(6, num_slots=8)
    first, second = bench.join(7, 6), bench.join(15, 9)
    out = bench.steps(2)[1].swap_outs[0]
    assert second.state is SequenceState.SWAPPED
    assert bench.host_pool is not None
    assert bench.host_pool.usage().held == 4
    while first.state is not SequenceState.DONE:
        assert bench.step().swap_ins == []
    back = bench.step()
    assert [b.sequence for b in back.swap_ins] == [second]
    assert back.swap_ins[0].slots == out.slots
    assert second.lease is not None
    assert back.swap_ins[0].blocks == second.lease.blocks[:4]
    assert parts(back) == [second]
    assert bench.host_pool.usage().held == 0
    while second.state is not SequenceState.DONE:
        bench.step()
    assert (bench.pool.usage().held, len(bench.ledger)) == (0, 0)


def test_without_room_in_the_host_a_victim_is_returned() -> None:
    bench = Bench(6, num_slots=3)
    first, second = bench.join(7, 16), bench.join(15, 8)
    decision = bench.steps(2)[1]
    assert decision.returned == [second]
    assert second.state is SequenceState.DONE
    assert second.claim is not None
    assert (second.claim.withdrawn, second.claim.num_preemptions) == (True, 1)
    assert parts(decision) == [first]
    assert len(bench.ledger) == 1


def test_two_that_exceed_the_pool_finish_one_after_the_other() -> None:
    bench = Bench(8, num_slots=8)
    first, second = bench.join(4, 29), bench.join(4, 29)  # each fills the pool: 32 rows
    for _ in range(80):
        if second.state is SequenceState.DONE:
            break
        bench.step()
    assert first.num_output_tokens == second.num_output_tokens == 29
    assert victims(bench.decisions) == [second]
    assert bench.scheduler.num_preemptions == 1


def test_a_protected_one_yields_only_when_all_others_are_protected() -> None:
    bench = Bench(6, num_slots=8)
    bench.join(7, 18)
    middle = bench.join(7, 18)
    newest = bench.join(7, 8)
    protect(newest)
    assert victims(bench.steps(2)) == [middle]
    bench = Bench(6, num_slots=8)
    everybody = [bench.join(7, 18) for _ in range(3)]
    for sequence in everybody:
        protect(sequence)
    assert victims(bench.steps(2)) == [everybody[2]]


def protect(sequence: Sequence) -> None:
    assert sequence.claim is not None
    sequence.claim.num_preemptions = 3


def test_one_whose_kv_has_landed_and_waits_for_a_place_yields_too() -> None:
    bench = Bench(4, num_slots=4, max_batch_size=1)
    running, waiting = bench.join(7, 8), bench.join(7, 8)
    decision = bench.steps(2)[1]
    assert victims([decision]) == [waiting]
    assert parts(decision) == [running]
    assert bench.scheduler.num_swapped == 1


def test_the_batch_has_a_limit_and_the_swapped_go_before_newcomers() -> None:
    bench = Bench(8, num_slots=8, max_batch_size=2)
    first, second = bench.join(7, 6), bench.join(15, 9)
    new, newer = bench.join(1, 8), bench.join(1, 8)
    protect(new)
    protect(newer)
    decisions = bench.steps(2)
    assert [parts(decision) for decision in decisions] == [[first, second], [first, new]]
    assert victims(decisions) == [second]
    bench.end(first)
    assert set(parts(bench.step())) == {new, second}
    assert newer.state is SequenceState.WAITING


def test_a_swapped_one_stays_out_while_it_would_not_fit_at_its_expected_end() -> None:
    bench = Bench(6, num_slots=8)
    first, second = bench.join(7, 18), bench.join(7, 18)
    blocker = bench.pool.allocate(1)
    assert blocker is not None
    bench.steps(1)
    assert victims(bench.steps(1)) == [second]
    bench.ledger.record(16)  # now both are expected to have 22 rows: 6 blocks each
    bench.pool.free(blocker)
    assert bench.pool.usage().available == 3  # the blocks that it had, and one
    assert [d.swap_ins for d in bench.steps(3)] == [[], [], []]
    bench.end(first)
    assert [back.sequence for back in bench.step().swap_ins] == [second]
    bench = Bench(6, num_slots=8)  # the same with short answers: it is back at once
    first, second = bench.join(7, 18), bench.join(7, 18)
    blocker = bench.pool.allocate(1)
    assert blocker is not None
    bench.steps(2)
    bench.ledger.record(3)
    bench.pool.free(blocker)
    assert [back.sequence for back in bench.step().swap_ins] == [second]


def test_cancelling_frees_blocks_slots_and_claims_in_every_state() -> None:
    bench = Bench(7, num_slots=8, max_batch_size=2)
    sequences = [bench.join(7, 18), bench.join(7, 18), bench.join(7, 18), bench.join(1, 8)]
    protect(sequences[-1])
    bench.steps(2)
    others = {SequenceState.DONE, SequenceState.PARKED}
    assert {s.state for s in sequences} == set(SequenceState) - others
    for sequence in sequences:
        bench.end(sequence)
        bench.scheduler.remove(sequence)
    assert bench.host_pool is not None
    assert (bench.pool.usage().held, bench.host_pool.usage().held) == (0, 0)
    assert len(bench.ledger) == 0
    assert bench.scheduler.schedule(0.0) is None


def test_batch_makes_room_for_an_interactive_one_that_waits_and_stays_out_meanwhile() -> None:
    bench = Bench(6, num_slots=8)
    batch = [bench.join(7, 18, BATCH), bench.join(7, 18, BATCH)]
    bench.step()
    waiting = Newcomer(rows=11, max_rows=20, max_tokens=10)
    bench.scheduler.note_waiting([waiting])
    assert victims([bench.step()]) == [batch[1]]
    assert bench.pool.usage().available >= 3
    for _ in range(2):
        decision = bench.step()
        assert (victims([decision]), decision.swap_ins) == ([], [])
    bench.ledger.admit(waiting)


def test_who_made_room_comes_back_behind_the_one_that_it_was_made_for() -> None:
    bench = Bench(6, num_slots=8)
    batch = bench.join(7, 16, BATCH)
    bench.steps(8)  # 15 rows: 4 blocks
    waiting = Newcomer(rows=11, max_rows=12, max_tokens=2)
    bench.scheduler.note_waiting([waiting])
    assert victims([bench.step()]) == [batch]
    assert bench.scheduler.schedule(bench.now) is None  # all is free, and not for it
    [claim] = bench.ledger.admit(waiting)
    bench.scheduler.note_waiting([])
    assert bench.scheduler.schedule(bench.now) is None  # 4 are not there
    bench.ledger.withdraw(claim)
    assert [back.sequence for back in bench.step().swap_ins] == [batch]


def test_who_made_room_comes_back_where_the_other_cannot_come_in_after_all() -> None:
    bench = Bench(6, num_slots=8)
    batch = bench.join(7, 16, BATCH)
    bench.steps(8)
    bench.scheduler.note_waiting([Newcomer(rows=19, max_rows=20, max_tokens=2)])
    assert victims([bench.step()]) == [batch]
    assert bench.pool.reserve(2)  # somebody else was quicker
    assert [back.sequence for back in bench.step().swap_ins] == [batch]


def test_batch_that_was_preempted_too_often_makes_no_room() -> None:
    bench = Bench(6, num_slots=8)
    batch = [bench.join(7, 9, BATCH), bench.join(7, 9, BATCH)]
    bench.step()
    protect(batch[0])
    protect(batch[1])
    bench.scheduler.note_waiting([Newcomer(rows=11, max_rows=12, max_tokens=2)])
    assert victims([bench.step()]) == []


def test_batch_that_lay_long_enough_counts_as_interactive() -> None:
    bench = Bench(6, num_slots=8)
    first, batch = bench.join(7, 18), bench.join(15, 9, BATCH)
    bench.steps(2)
    assert batch.state is SequenceState.SWAPPED
    assert batch.claim is not None
    bench.now += BATCH_AGEING_S
    bench.step()
    assert batch.claim.priority is Priority.INTERACTIVE
    bench.end(first)
    assert [back.sequence for back in bench.step().swap_ins] == [batch]


def test_with_reserve_nobody_is_ever_preempted() -> None:
    bench = Bench(8, num_slots=8, mode=AdmissionMode.RESERVE)
    both = [bench.join(4, 13), bench.join(4, 13, BATCH)]
    bench.scheduler.note_waiting([Newcomer(rows=4, max_rows=20, max_tokens=17)])
    assert victims(bench.steps(12)) == []
    assert [s.num_output_tokens for s in both] == [13, 13]
    assert bench.pool.usage().available == 8


def test_blocks_promised_to_others_make_it_sit_out_a_step() -> None:
    bench = Bench(4)
    alone = bench.join(7, 8)
    bench.step()
    assert bench.pool.reserve(2)
    assert bench.scheduler.schedule(0.0) is None
    bench.pool.unreserve(2)
    assert parts(bench.step()) == [alone]


def test_a_step_is_waited_for_where_it_will_give_blocks_back() -> None:
    bench = Bench(4, num_slots=4)
    first, ending = bench.join(7, 8), bench.join(6, 2)
    decision = bench.scheduler.schedule(0.0)
    assert decision is not None
    bench.scheduler.commit(decision)
    for sequence in (first, ending):  # sampled on the device, not read yet
        sequence.num_unread = 1
    assert ending.ends_unread
    assert bench.scheduler.schedule(0.0) is None  # the first needs a block; two are coming
    assert bench.scheduler.num_preemptions == 0


def test_a_fork_shares_full_blocks_and_gets_a_copy_of_the_tail() -> None:
    bench = Bench(8)
    claims = bench.ledger.admit(Newcomer(9, 14, 6, num_answers=2))
    first, second = bench.sequence(9, 6), bench.sequence(9, 6)
    first.claim, second.claim = claims
    blocks, _ = bench.ledger.bind(claims[0])
    first.lease = BlockLease(bench.pool, blocks)
    bench.pool.share(blocks)
    own = bench.ledger.bind_fork(claims[1])
    second.lease = BlockLease(bench.pool, blocks[:2] + own)
    bench.scheduler.add(first)
    bench.scheduler.fork(second, blocks[2])
    decision = bench.step()
    assert [(copy.source, copy.target) for copy in decision.copies] == [(blocks[2], own[0])]
    assert parts(decision) == [first, second]
    assert bench.pool.references() == {blocks[0]: 2, blocks[1]: 2, blocks[2]: 1, own[0]: 1}
    while second.state is not SequenceState.DONE:
        bench.step()
    assert bench.pool.usage().held == 0


def test_a_fork_that_is_cancelled_before_its_copy_leaves_nothing() -> None:
    bench = Bench(8)
    claims = bench.ledger.admit(Newcomer(9, 14, 6, num_answers=2))
    second = bench.sequence(9, 6)
    second.claim = claims[1]
    blocks, _ = bench.ledger.bind(claims[0])
    bench.pool.share(blocks)
    second.lease = BlockLease(bench.pool, blocks[:2] + bench.ledger.bind_fork(claims[1]))
    bench.scheduler.fork(second, blocks[2])
    bench.end(second)
    assert bench.scheduler.schedule(0.0) is None
    assert bench.pool.references() == dict.fromkeys(blocks, 1)


def test_finished_answers_are_recorded_and_cancelled_and_broken_ones_are_not() -> None:
    bench = Bench(16)
    bench.join(3, 6)
    cancelled, broken = bench.join(3, 20), bench.join(3, 20)
    bench.steps(7)  # the record is of one answer: what came last is all that it has
    assert cancelled.num_output_tokens == broken.num_output_tokens == 8
    broken.finish_reason = FinishReason.BROKEN
    for sequence in (cancelled, broken):
        bench.end(sequence)
        assert bench.ledger._lengths.expected(100, 0, 0.5) == 6


def test_what_a_broken_answer_read_and_wrote_is_not_found_any_more() -> None:
    bench = Bench(8)
    broken, well = bench.join(3, 20), bench.join(3, 20)
    for name, sequence in ((b"broken", broken), (b"well", well)):
        assert sequence.lease is not None
        bench.pool.register(sequence.lease.blocks[0], name)
    bench.steps(2)
    broken.finish_reason = FinishReason.BROKEN
    for sequence in (broken, well):
        bench.end(sequence)
    assert bench.pool.count_cached_prefix([b"broken"]) == 0
    assert bench.pool.count_cached_prefix([b"well"]) == 1


# Prompts that are computed here.


def sizes(decision: Decision) -> list[int]:
    return [part.num_tokens for part in decision.parts]


def test_prompts_are_computed_in_pieces_beside_the_others_and_then_decode() -> None:
    bench = Bench(100)
    stream = bench.join(3, 20)
    first, second = bench.begin(40, 9), bench.begin(30, 9)
    assert bench.scheduler.num_waiting_tokens == 70
    assert sizes(bench.step()) == [1, 32]  # the second gets none of the budget
    assert bench.scheduler.num_waiting_tokens == 38
    assert (first.num_output_tokens, second.num_computed) == (0, 0)
    decision = bench.step()
    assert sizes(decision) == [1, 8, 24]
    assert [part.sequence for part in decision.prompt_parts] == [first, second]
    assert decision.num_prompt_tokens == 32
    assert (first.num_output_tokens, second.num_output_tokens) == (1, 0)
    assert sizes(bench.step()) == [1, 1, 6]
    decision = bench.step()
    assert sizes(decision) == [1, 1, 1]
    assert decision.prompt_parts == []
    assert bench.scheduler.num_waiting_tokens == 0
    assert [s.num_output_tokens for s in (stream, first, second)] == [5, 3, 2]


def test_where_they_are_not_mixed_prompts_and_others_take_turns() -> None:
    bench = Bench(200, mixes_prompts=False)
    stream, long = bench.join(3, 20), bench.begin(300, 9)
    assert [sizes(bench.step()) for _ in range(6)] == [[128], [1], [128], [1], [44], [1, 1]]
    assert (stream.num_output_tokens, long.num_output_tokens) == (4, 2)
    bench.end(stream)
    bench.end(long)
    bench.begin(300, 9)
    assert [sizes(bench.step()) for _ in range(4)] == [[128], [128], [44], [1]]  # none to wait for


def test_what_is_cached_is_not_computed_and_what_is_filled_is_found() -> None:
    bench = Bench(100)
    hashes = [b"%d" % place for place in range(10)]
    first = bench.begin(40, 9, hashes)
    bench.step()
    assert bench.pool.count_cached_prefix(hashes) == 8  # as far as it is computed
    bench.step()
    assert bench.pool.count_cached_prefix(hashes) == 10
    second = bench.begin(40, 9, hashes)
    assert second.num_computed == 36  # the last block is its own
    assert lease_of(second).blocks[:9] == lease_of(first).blocks[:9]
    assert lease_of(second).blocks[9] != lease_of(first).blocks[9]
    assert sizes(bench.step()) == [1, 4]


def test_half_a_prompt_that_is_swapped_out_comes_back_to_all_its_blocks() -> None:
    bench = Bench(25, num_slots=25)
    old = bench.join(15, 20)
    prompt = bench.begin(79, 9)  # 20 of the other 21 blocks
    [blocker] = bench.pool.allocate(1) or []
    decision = bench.step()  # the other's 16th row has a place
    assert sizes(decision) == [1, 32]
    decision = bench.step()  # its 17th has not
    assert [out.sequence for out in decision.swap_outs] == [prompt]
    assert len(decision.swap_outs[0].slots) == 8
    assert bench.scheduler.num_waiting_tokens == 79 - 32
    bench.end(old)
    bench.pool.free([blocker])
    decision = bench.step()
    assert [len(back.blocks) for back in decision.swap_ins] == [8]
    assert len(lease_of(prompt).blocks) == 20
    assert sizes(decision) == [32]
    assert claim_of(prompt).rows == 79
    assert sizes(bench.step()) == [15]
    assert prompt.num_output_tokens == 1


def test_half_a_prompt_that_is_returned_leaves_nothing() -> None:
    bench = Bench(25)
    bench.join(15, 20)
    prompt = bench.begin(79, 9)
    bench.pool.allocate(1)
    bench.step()
    assert bench.step().returned == [prompt]
    assert bench.scheduler.num_waiting_tokens == 0
    assert claim_of(prompt).withdrawn


def test_prompts_can_be_dropped_in_every_state_and_before_their_first_token() -> None:
    bench = Bench(29, num_slots=25, max_batch_size=2)
    bench.join(15, 20)
    running, waiting, swapped = bench.begin(79, 9), bench.begin(5, 3), bench.begin(5, 3)
    [blocker] = bench.pool.allocate(1) or []
    bench.steps(2)
    states = [SequenceState.RUNNING, SequenceState.WAITING, SequenceState.SWAPPED]
    assert [s.state for s in (running, waiting, swapped)] == states
    assert bench.scheduler.num_waiting_tokens == 79 - 64 + 5 + 5
    for sequence in (running, waiting, swapped):
        sequence.finish_reason = FinishReason.STOP  # by its client
        bench.end(sequence)
    assert bench.scheduler.num_waiting_tokens == 0
    assert bench.ledger._lengths.expected(100, 0, 0.5) == 1, "no tokens are no answer"
    assert len(bench.ledger) == 1
    bench.pool.free([blocker])
