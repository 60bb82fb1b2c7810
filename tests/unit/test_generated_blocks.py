"""Which blocks that decode fills are registered, when, and under what hash."""

from __future__ import annotations

from legato.protos.prefix_hash import PrefixHasher
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.generated import GeneratedBlocks
from legato.worker.sequence import Sequence, SequenceState

BLOCK_SIZE = 4
HASHER = PrefixHasher("m", BLOCK_SIZE, kv_kind="float32")
TOKENS = list(range(100, 140))
HASHES = HASHER.block_hashes(TOKENS)


def running(pool: BlockPool, num_rows: int, *, hasher: PrefixHasher | None = HASHER) -> Sequence:
    """With `num_rows` landed, and blocks for all that will come."""
    blocks = pool.allocate(6)
    assert blocks is not None
    for block, block_hash in zip(blocks[: num_rows // BLOCK_SIZE], HASHES, strict=False):
        pool.register(block, block_hash)  # as who landed the rows does
    sequence = Sequence(
        TOKENS[: num_rows + 1],
        num_rows,
        SamplingParams.greedy_for(20),
        frozenset(),
        num_computed=num_rows,
        hasher=hasher,
        lease=BlockLease(pool, blocks),
    )
    sequence.move_to(SequenceState.RUNNING)
    return sequence


def settle(generated: GeneratedBlocks, sequence: Sequence, num_rows: int) -> None:
    """`num_rows` steps, one after the other."""
    for _ in range(num_rows):
        sequence.num_computed += 1
        generated.note_rows(sequence, 1)
        sequence.append(TOKENS[len(sequence.token_ids)])


def found(pool: BlockPool) -> int:
    return pool.count_cached_prefix(HASHES)


def test_a_block_is_found_when_its_last_row_is_written() -> None:
    pool = BlockPool(10)
    generated = GeneratedBlocks(pool, BLOCK_SIZE)
    sequence = running(pool, 6)
    generated.begin(sequence)
    counts = []
    for _ in range(11):
        settle(generated, sequence, 1)
        counts.append(found(pool))
    assert counts == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]  # rows 7, 8, ... 17
    assert sequence.lease is not None
    blocks = list(sequence.lease.blocks)
    sequence.move_to(SequenceState.DONE)
    sequence.lease.release()
    shared = pool.acquire(HASHES, 4)
    assert shared == (blocks[:4], 4)


def test_steps_that_overlap_are_settled_while_the_next_is_computed_already() -> None:
    pool = BlockPool(10)
    generated = GeneratedBlocks(pool, BLOCK_SIZE)
    sequence = running(pool, 6)
    generated.begin(sequence)
    sequence.num_computed += 1  # started, not settled
    settle(generated, sequence, 1)
    assert (sequence.num_computed, found(pool)) == (8, 1)
    settle(generated, sequence, 1)
    assert found(pool) == 2


def test_one_that_yielded_its_blocks_meanwhile_registers_none() -> None:
    pool = BlockPool(10)
    generated = GeneratedBlocks(pool, BLOCK_SIZE)
    sequence = running(pool, 7)
    generated.begin(sequence)
    assert sequence.lease is not None
    gone = list(sequence.lease.blocks)
    sequence.lease.blocks.clear()
    sequence.move_to(SequenceState.SWAPPED)
    sequence.num_registered = 0
    settle(generated, sequence, 1)
    assert found(pool) == 1

    # Its new blocks have no names, the old ones' are forgotten.
    for block in gone:
        assert pool.make_writable(block)
    pool.free(gone)
    sequence.lease.blocks.extend(pool.allocate(4) or [])
    sequence.move_to(SequenceState.RUNNING)
    settle(generated, sequence, 1)
    assert found(pool) == 2
    assert pool.acquire(HASHES, 2) == (sequence.lease.blocks[:2], 2)


def test_without_a_hasher_nothing_is_registered() -> None:
    pool = BlockPool(10)
    generated = GeneratedBlocks(pool, BLOCK_SIZE)
    sequence = running(pool, 3, hasher=None)
    generated.begin(sequence)
    settle(generated, sequence, 9)
    assert found(pool) == 0
