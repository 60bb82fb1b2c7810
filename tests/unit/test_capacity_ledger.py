"""Who may come in: the peak of all growth, and the rules over it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from legato.worker.kv.block_pool import BlockPool, blocks_for
from legato.worker.priority import Priority
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.claim import (
    AdmissionMode,
    AdmissionRule,
    Claim,
    NeverFitsError,
    Newcomer,
    NoRoomNowError,
)
from legato.worker.scheduling.growth import Growth, peak_blocks
from legato.worker.scheduling.output_lengths import OutputLengths

BLOCK_SIZE = 4


def ledger(
    num_blocks: int, *, mode: AdmissionMode = AdmissionMode.EXPECTED, expected: int = 8
) -> tuple[CapacityLedger, BlockPool]:
    """Every answer is expected to have `expected` tokens."""
    pool = BlockPool(num_blocks)
    lengths = OutputLengths(prior_tokens=expected)
    return CapacityLedger(pool, BLOCK_SIZE, AdmissionRule(mode), lengths), pool


def newcomer(prompt: int, max_tokens: int, **changes: object) -> Newcomer:
    made = Newcomer(rows=prompt, max_rows=prompt + max_tokens - 1, max_tokens=max_tokens)
    return replace(made, **changes)  # type: ignore[arg-type]  # the caller names fields


def test_the_peak_is_that_of_a_simulation_step_by_step() -> None:
    draw = random.Random(3)
    for _ in range(400):
        size = draw.choice((1, 2, 4, 16))
        growths = []
        for _ in range(draw.randint(0, 12)):
            rows = draw.randint(1, 60)
            shared = draw.randint(0, rows // size)
            growths.append(Growth(rows, rows + draw.randint(-3, 50), shared))
        right = 0
        for step in range(60):
            alive = [g for g in growths if step <= g.steps_left]
            right = max(
                right, sum(blocks_for(g.rows + step, size) - g.shared_blocks for g in alive)
            )
        assert peak_blocks(growths, size) == right


def test_those_at_different_stages_count_with_their_peak_not_their_sum() -> None:
    # 8 rows to go and 1 row to go: the second is gone before the first is large.
    early, late = Growth(4, 12), Growth(11, 12)
    assert peak_blocks([early, late], BLOCK_SIZE) == 5
    assert peak_blocks([early], BLOCK_SIZE) + peak_blocks([late], BLOCK_SIZE) == 6


def test_a_newcomer_enters_by_what_is_expected_and_not_by_max_tokens() -> None:
    book, pool = ledger(8, expected=5)
    for _ in range(2):  # each is expected to end at 8 + 5 - 1 = 12 rows, 3 blocks
        book.admit(newcomer(8, 16))
    assert pool.usage().reserved == 6  # with the block that the first step needs
    with pytest.raises(NoRoomNowError, match="9 blocks are expected"):
        book.admit(newcomer(7, 16))
    assert pool.usage().reserved == 6
    assert len(book) == 2


def test_blocks_that_are_not_there_now_refuse_at_once() -> None:
    book, pool = ledger(8, expected=1)
    assert pool.allocate(6) is not None
    with pytest.raises(NoRoomNowError, match="3 blocks are needed now; 2 are available"):
        book.admit(newcomer(9, 8))


def test_reserve_promises_all_and_gives_it_out_one_by_one() -> None:
    book, pool = ledger(8, mode=AdmissionMode.RESERVE)
    [claim] = book.admit(newcomer(5, 12))  # 16 rows
    assert pool.usage().reserved == 4
    blocks, found = book.bind(claim)
    assert (len(blocks), found, pool.usage().reserved) == (2, 0, 2)
    assert book.take_promised(claim) is not None
    with pytest.raises(NoRoomNowError):
        book.admit(newcomer(5, 14))
    book.admit(newcomer(5, 12))
    book.withdraw(claim)
    book.withdraw(claim)
    assert (pool.usage().held, pool.usage().reserved) == (3, 4)
    assert len(book) == 1


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_what_can_never_fit_is_told_with_the_numbers(mode: AdmissionMode) -> None:
    book, pool = ledger(8, mode=mode)
    book.admit(newcomer(20, 13))  # exactly the pool
    with pytest.raises(NeverFitsError, match=r"33 rows of KV need 9 blocks of 4 .* 8 in all"):
        book.admit(newcomer(20, 14))
    assert pool.usage().reserved == (8 if mode is AdmissionMode.RESERVE else 6)


def test_several_answers_count_the_shared_blocks_once() -> None:
    book, pool = ledger(8, expected=2)
    request = newcomer(9, 4, num_answers=3)  # 2 full blocks are shared
    claims = book.admit(request)
    assert [claim.promised for claim in claims] == [3, 1, 1]
    blocks, _ = book.bind(claims[0])
    forks = [book.bind_fork(claim) for claim in claims[1:]]
    assert [len(own) for own in (blocks, *forks)] == [3, 1, 1]
    assert (pool.usage().held, pool.usage().reserved) == (5, 0)
    with pytest.raises(NeverFitsError, match="need 9 blocks"):
        book.admit(newcomer(9, 4, num_answers=7))


def test_batch_enters_only_beside_the_interactive_ones_that_wait() -> None:
    book, _ = ledger(8, expected=4)
    batch = newcomer(8, 16, priority=Priority.BATCH)
    waiting = [newcomer(20, 13)]
    with pytest.raises(NoRoomNowError):
        book.admit(batch, waiting)
    book.admit(batch)


def test_interactive_ones_count_batch_with_what_it_holds_unless_it_is_protected() -> None:
    for num_preemptions, enters in ((0, True), (3, False)):
        book, _ = ledger(8, expected=1000)
        changes = {"priority": Priority.BATCH, "num_preemptions": num_preemptions}
        book.admit(newcomer(4, 20, **changes))  # 2 blocks now, 5 in 15 steps
        if enters:
            book.admit(newcomer(4, 16))
        else:
            with pytest.raises(NoRoomNowError):
                book.admit(newcomer(4, 16))


def test_those_swapped_out_keep_newcomers_of_their_priority_away() -> None:
    book, _ = ledger(8, expected=1000)
    [claim] = book.admit(newcomer(12, 8))  # 19 rows: 5 blocks
    swap_out(claim, book)
    with pytest.raises(NoRoomNowError, match="9 blocks are expected"):
        book.admit(newcomer(8, 8))
    book.admit(newcomer(4, 9))
    assert not book.may_return(claim, 7)  # 2 are gone to the newcomer
    assert book.may_return(claim, 4)


def test_each_preemption_halves_the_risk() -> None:
    pool, lengths = BlockPool(100), OutputLengths(window=4, prior_tokens=1)
    for length in (10, 20, 30, 40):
        lengths.record(length)
    book = CapacityLedger(pool, BLOCK_SIZE, AdmissionRule(risk=0.75), lengths)
    expected = []
    for num_preemptions in range(4):
        [claim] = book.admit(newcomer(4, 90, num_preemptions=num_preemptions))
        expected.append(book._expected_rows(claim) - 3)
    assert expected == [10, 30, 40, 90]


def swap_out(claim: Claim, book: CapacityLedger) -> None:
    blocks, _ = book.bind(claim)
    book._pool.free(blocks)
    claim.own_blocks, claim.swapped = 0, True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdmissionRule(risk=1.0), r"risk must be in \[0, 1\), got 1.0"),
        (lambda: AdmissionRule(risk=float("nan")), "risk must be in"),
        (lambda: AdmissionRule(max_preemptions=0), "max_preemptions must be at least 1, got 0"),
        (lambda: Newcomer(0, 5, 5), r"rows must be in \[1, max_rows 5\], got 0"),
        (lambda: Newcomer(1, 5, 7), r"max_tokens must be in \[1, max_rows \+ 1 = 6\], got 7"),
        (lambda: Newcomer(1, 5, 5, num_answers=0), "num_answers must be at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
