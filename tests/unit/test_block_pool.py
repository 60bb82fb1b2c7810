"""BlockPool: references, cached prefixes, eviction, copy on write, one behaviour a test."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from legato.worker.engine_stats import EngineStats
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.kv.block_pool import BlockPool, PoolCounters, PoolUsage
from legato.worker.load import worker_load

if TYPE_CHECKING:
    from collections.abc import Callable

A, B, C, D, X = (name * 16 for name in (b"a", b"b", b"c", b"d", b"x"))


def taken(pool: BlockPool, num_blocks: int) -> list[int]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def cache(pool: BlockPool, *hashes: bytes) -> list[int]:
    """A sequence of full blocks that came and went."""
    blocks = taken(pool, len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        assert pool.register(block, block_hash)
    pool.free(blocks)
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    pool.check_integrity()
    usage = pool.usage()
    assert usage.free + usage.cached + usage.held == usage.total == pool.total
    assert usage.available + usage.reserved + usage.held == usage.total
    return usage.free, usage.cached, usage.held, usage.reserved


def test_a_pool_starts_free_and_costs_nothing_for_its_size() -> None:
    assert BlockPool(10**9).usage() == PoolUsage(10**9, 10**9, 0, 0, 0)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.allocate(-1),
        lambda pool: pool.reserve(-1),
        lambda pool: pool.unreserve(-1),
        lambda pool: pool.allocate_reserved(-1),
        lambda pool: pool.acquire([], -1),
        lambda pool: pool.acquire_reserved([], 1, -1),
    ],
)
def test_negative_counts_are_refused(call: Callable[[BlockPool], object]) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        call(BlockPool(2))


def test_what_was_used_last_is_used_next_in_the_order_of_the_sequence() -> None:
    pool = BlockPool(6)
    first, second = taken(pool, 2), taken(pool, 2)
    pool.free(first)
    pool.free(second)
    assert taken(pool, 4) == second + first


def test_a_released_block_is_cached_where_it_is_registered_and_free_where_not() -> None:
    pool = BlockPool(4)
    full, partial = taken(pool, 2)
    assert pool.register(full, A)
    assert counts(pool) == (2, 0, 2, 0)
    pool.free([full, partial])
    assert counts(pool) == (3, 1, 0, 0)


def test_free_blocks_go_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = cache(pool, A, B)
    assert not set(taken(pool, 2)) & set(cached)
    assert pool.counters().evictions == 0
    assert pool.count_cached_prefix([A, B]) == 2
    assert len(taken(pool, 1)) == 1
    assert pool.counters().evictions == 1
    assert counts(pool) == (0, 1, 3, 0)


def test_of_one_sequence_the_deepest_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = cache(pool, A, B, C)
    assert [taken(pool, 1)[0], pool.count_cached_prefix([A, B, C])] == [c, 2]
    assert [taken(pool, 1)[0], pool.count_cached_prefix([A, B, C])] == [b, 1]
    assert [taken(pool, 1)[0], pool.count_cached_prefix([A, B, C])] == [a, 0]
    assert pool.allocate(1) is None


def test_the_least_recently_released_is_evicted_first_and_a_look_is_no_use() -> None:
    pool = BlockPool(2)
    [a], [_] = cache(pool, A), cache(pool, B)
    assert pool.count_cached_prefix([A]) == 1
    assert taken(pool, 1) == [a]
    pool = BlockPool(2)
    [a], [b] = cache(pool, A), cache(pool, B)
    assert pool.acquire([A], 1) == ([a], 1)
    pool.free([a])
    assert taken(pool, 1) == [b]


def test_a_held_block_is_never_evicted_though_it_is_registered() -> None:
    pool = BlockPool(3)
    cache(pool, A, B)
    held = pool.acquire([A, B], 2)
    assert held is not None
    assert pool.allocate(2) is None
    assert not set(taken(pool, 1)) & set(held[0])
    assert pool.count_cached_prefix([A, B]) == 2


def test_acquire_shares_the_longest_registered_prefix_and_takes_the_rest() -> None:
    pool = BlockPool(8)
    a, b, c = cache(pool, A, B, C)
    got = pool.acquire([A, B, X, C], 5)
    assert got is not None
    blocks, matched = got
    assert (blocks[:2], matched, len(set(blocks))) == ([a, b], 2, 5)
    assert c not in blocks
    assert counts(pool) == (2, 1, 5, 0)
    assert pool.counters() == PoolCounters(4, 2, 0)


def test_acquire_matches_no_more_than_was_asked_for() -> None:
    pool = BlockPool(4)
    a, _ = cache(pool, A, B)
    assert pool.acquire([A, B], 1) == ([a], 1)
    assert pool.acquire([A, B], 0) == ([], 0)
    assert pool.counters() == PoolCounters(1, 1, 0)


def test_a_block_that_two_sequences_share_is_freed_with_the_second() -> None:
    pool = BlockPool(4)
    [a] = cache(pool, A)
    assert pool.acquire([A], 1) == pool.acquire([A], 1) == ([a], 1)
    pool.free([a])
    assert counts(pool) == (3, 0, 1, 0)
    pool.free([a])
    assert counts(pool) == (3, 1, 0, 0)
    with pytest.raises(ValueError, match="not held"):
        pool.free([a])


def test_a_cached_block_takes_room_when_it_is_acquired_and_a_held_one_does_not() -> None:
    pool = BlockPool(3)
    a, b = cache(pool, A, B)
    assert pool.reserve(2)
    assert pool.acquire([A, B], 2) is None
    assert counts(pool) == (1, 2, 0, 2)
    assert pool.counters() == PoolCounters(0, 0, 0)
    assert pool.acquire([A], 1) == ([a], 1)
    assert pool.acquire([A], 1) == ([a], 1)  # no room is left, and none is needed
    assert pool.acquire([A, B], 2) is None
    assert pool.allocate(1) is None
    pool.unreserve(1)
    assert pool.acquire([A, B], 2) == ([a, b], 2)
    assert counts(pool) == (1, 0, 2, 1)


def test_what_acquire_matches_is_not_evicted_for_its_own_new_blocks() -> None:
    pool = BlockPool(3)
    a, b = cache(pool, A, B)
    cache(pool, C)
    got = pool.acquire([A, B], 3)
    assert got is not None
    assert (got[0][:2], got[1]) == ([a, b], 2)
    assert pool.count_cached_prefix([C]) == 0
    assert counts(pool) == (0, 0, 3, 0)


def test_a_promise_pays_for_what_is_acquired_with_it() -> None:
    pool = BlockPool(4)
    a, b = cache(pool, A, B)
    assert pool.reserve(3)
    got = pool.acquire_reserved([A, B], 3, 3)
    assert got is not None
    assert (got[0][:2], got[1], counts(pool)) == ([a, b], 2, (1, 0, 3, 0))
    with pytest.raises(ValueError, match="1 blocks are not promised, only 0 are"):
        pool.acquire_reserved([A], 1, 1)


def test_a_promise_larger_than_what_is_acquired_is_given_up_whole() -> None:
    pool = BlockPool(4)
    assert pool.reserve(4)
    assert pool.acquire_reserved([], 2, 3) == ([0, 1], 0)
    assert counts(pool) == (2, 0, 2, 1)


def test_a_promise_stands_where_more_than_it_was_asked_for_and_there_is_no_room() -> None:
    pool = BlockPool(4)
    assert pool.reserve(4)
    assert pool.acquire_reserved([], 3, 2) is None
    assert counts(pool) == (4, 0, 0, 4)
    pool.unreserve(1)
    assert pool.acquire_reserved([], 3, 2) is not None
    assert counts(pool) == (1, 0, 3, 1)


def test_cached_blocks_may_be_promised_and_are_evicted_for_the_promise() -> None:
    pool = BlockPool(3)
    cache(pool, A, B)
    assert not pool.reserve(4)
    assert pool.reserve(3)
    assert pool.usage().available == 0
    assert len(pool.allocate_reserved(3)) == 3
    assert counts(pool) == (0, 0, 3, 0)
    assert pool.counters().evictions == 2


def test_the_first_block_of_a_hash_stays_registered() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 2)
    assert pool.register(first, A)
    assert pool.register(first, A)  # said twice
    assert not pool.register(second, A)
    pool.free([first, second])
    assert counts(pool) == (3, 1, 0, 0)
    assert pool.acquire([A], 1) == ([first], 1)


def test_register_takes_held_blocks_and_one_hash_each() -> None:
    pool = BlockPool(4)
    [a] = taken(pool, 1)
    assert pool.register(a, A)
    with pytest.raises(ValueError, match=f"block {a} is registered under another hash"):
        pool.register(a, B)
    with pytest.raises(ValueError, match=r"blocks \[3\] are not held and cannot be registered"):
        pool.register(3, B)
    pool.free([a])
    with pytest.raises(ValueError, match="not held"):
        pool.register(a, A)
    assert counts(pool) == (3, 1, 0, 0)


def test_an_evicted_hash_may_be_registered_anew() -> None:
    pool = BlockPool(1)
    cache(pool, A)
    [block] = taken(pool, 1)
    assert pool.count_cached_prefix([A]) == 0
    assert pool.register(block, B)
    pool.free([block])
    cache(pool, A)
    assert (pool.count_cached_prefix([A]), pool.count_cached_prefix([B])) == (1, 0)


def test_hashes_that_repeat_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(4)
    cache(pool, A)
    with pytest.raises(ValueError, match="twice"):
        pool.acquire([A, A], 2)
    assert counts(pool) == (3, 1, 0, 0)


def test_share_needs_held_blocks_and_frees_one_reference_at_a_time() -> None:
    pool = BlockPool(4)
    blocks = taken(pool, 2)
    pool.share(blocks)
    for wrong, message in (([blocks[0], 3], "not held and cannot be shared"), ([0, 0], "twice")):
        with pytest.raises(ValueError, match=message):
            pool.share(wrong)
    pool.free(blocks)
    assert counts(pool) == (2, 0, 2, 0)
    pool.free(blocks)
    assert counts(pool) == (4, 0, 0, 0)


def test_nothing_is_freed_where_one_block_of_the_list_is_wrong() -> None:
    pool = BlockPool(6)
    blocks = taken(pool, 2)
    pool.share(blocks)
    [cached] = cache(pool, A)
    for wrong, message in (
        ([*blocks, cached], "not held and cannot be freed"),
        ([*blocks, 5], "not held"),
        ([*blocks, blocks[0]], "twice"),  # though it is held twice
        ([*blocks, 6], "not held"),
        ([*blocks, -1], "not held"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.free(wrong)
    pool.free(blocks)
    assert counts(pool) == (3, 1, 2, 0)


def test_a_block_is_writable_while_one_holds_it_and_nobody_may_find_it() -> None:
    pool = BlockPool(4)
    [block] = taken(pool, 1)
    assert pool.is_writable(block)
    pool.share([block])
    assert not pool.is_writable(block)
    pool.free([block])
    assert pool.is_writable(block)
    pool.register(block, A)
    assert not pool.is_writable(block)
    pool.free([block])
    assert not pool.is_writable(block)
    assert not pool.is_writable(3)


def test_replace_keeps_a_writable_block() -> None:
    pool = BlockPool(1)
    [block] = taken(pool, 1)
    assert pool.replace(block) == block
    assert counts(pool) == (0, 0, 1, 0)


def test_replace_moves_one_of_two_sharers_to_a_block_of_its_own() -> None:
    pool = BlockPool(4)
    [block] = taken(pool, 1)
    pool.share([block])
    new = pool.replace(block)
    assert new is not None
    assert new != block
    assert pool.is_writable(block)
    assert pool.is_writable(new)
    assert counts(pool) == (2, 0, 2, 0)


def test_replace_leaves_a_registered_block_in_the_cache() -> None:
    pool = BlockPool(2)
    [block] = taken(pool, 1)
    pool.register(block, A)
    new = pool.replace(block)
    assert new is not None
    assert new != block
    assert counts(pool) == (0, 1, 1, 0)
    assert pool.acquire([A], 1) == ([block], 1)


def test_replace_changes_nothing_where_no_block_is_available() -> None:
    pool = BlockPool(2)
    [block] = taken(pool, 1)
    pool.share([block])
    assert pool.reserve(1)
    assert pool.replace(block) is None
    assert not pool.is_writable(block)
    assert counts(pool) == (1, 0, 1, 1)
    with pytest.raises(ValueError, match=r"blocks \[1\] are not held and cannot be replaced"):
        pool.replace(1)


def test_an_unregistered_block_is_found_no_more_and_is_free_with_its_last_holder() -> None:
    pool = BlockPool(4)
    cache(pool, A, B)
    found = pool.acquire([A, B], 3)
    assert found is not None
    blocks, _ = found
    pool.share(blocks[:1])
    with pytest.raises(ValueError, match="are not held and cannot be unregistered"):
        pool.unregister([*blocks, 3])
    assert pool.count_cached_prefix([A, B]) == 2
    for _ in range(2):
        pool.unregister(blocks)
        assert pool.count_cached_prefix([A, B]) == 0
    pool.free(blocks)
    assert counts(pool) == (3, 0, 1, 0)
    pool.free(blocks[:1])
    assert counts(pool) == (4, 0, 0, 0)
    assert len(cache(pool, A, B)) == 2


def test_forgetting_frees_the_cached_and_leaves_the_held() -> None:
    pool = BlockPool(6)
    a, _, _ = cache(pool, A, B, C)
    assert pool.acquire([A], 1) == ([a], 1)
    pool.forget_cached()
    assert counts(pool) == (5, 0, 1, 0)
    assert pool.count_cached_prefix([A, B]) == 1
    assert pool.counters().evictions == 0
    pool.free([a])
    assert counts(pool) == (5, 1, 0, 0)


def test_a_look_counts_held_and_cached_blocks_and_changes_nothing() -> None:
    pool = BlockPool(4)
    cache(pool, A, B)
    pool.acquire([A], 1)
    before = pool.usage(), pool.counters()
    assert pool.count_cached_prefix([A, B, C]) == 2
    assert pool.count_cached_prefix([B]) == 1
    assert pool.count_cached_prefix([C, A]) == 0
    assert pool.count_cached_prefix([]) == 0
    assert (pool.usage(), pool.counters()) == before


def test_the_load_report_calls_free_what_may_be_had_now() -> None:
    pool = BlockPool(8)
    cache(pool, A, B, C)
    taken(pool, 1)
    pool.reserve(2)
    assert counts(pool) == (4, 3, 1, 2)
    load = worker_load(
        "decode",
        pool.usage(),
        pool.counters(),
        EngineStats(),
        TransferCounters(),
        0,
        None,
        now_s=0.0,
    )
    assert (load.free_blocks, load.reserved_blocks, load.held_blocks) == (5, 2, 1)
    assert load.free_blocks + load.reserved_blocks + load.held_blocks == load.total_blocks


def test_threads_that_take_and_give_at_once_lose_nothing() -> None:
    pool = BlockPool(16)
    errors: list[BaseException] = []
    interval_s = sys.getswitchinterval()

    def work(number: int) -> None:
        try:
            for turn in range(10_000):
                hashes = [bytes([turn % 3, i]) for i in range(3)]
                if (got := pool.acquire(hashes, 4)) is not None:
                    blocks, matched = got
                    for block, block_hash in list(zip(blocks, hashes, strict=False))[matched:]:
                        pool.register(block, block_hash)
                    pool.share(blocks)
                    pool.free(blocks)
                    pool.free(blocks)
                if pool.reserve(number):
                    pool.free(pool.allocate_reserved(number))
        except BaseException as error:  # whatever it is, the test shows it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    sys.setswitchinterval(1e-6)  # else a thread would be done before the next begins
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []
    assert counts(pool)[2:] == (0, 0)
