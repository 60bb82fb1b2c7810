"""BlockPool: which KV blocks are free, cached, promised or held. It knows no tensor."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.kv.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class PoolUsage:
    """Counts of blocks at one moment; free + cached + held == total."""

    total: int
    free: int  # contents worthless
    cached: int  # nobody refers to them; the contents may be found by their hash, or evicted
    held: int
    reserved: int  # promised; names no blocks, bounded by free + cached

    @property
    def available(self) -> int:
        """What may be allocated or promised now; available + reserved + held == total."""
        return self.free + self.cached - self.reserved


@dataclass(frozen=True)
class PoolCounters:
    """Sums since the pool was made. An `acquire` that found no room counts nowhere."""

    prefix_blocks_asked: int
    prefix_blocks_hit: int
    evictions: int


class BlockPool:
    """Hands out blocks, counts who refers to them, and keeps those that may be wanted again.

    A block is *free*, *held* (one reference or more) or *cached*. `register` says that a held
    block is full, will not change, and has this hash; when its last reference goes, it is cached.
    There `acquire` finds it, until room is needed: free blocks go first, then cached ones, least
    recently released first and of one sequence the last first, since a prefix is of use only
    from its start. The hash must cover all that the contents depend on (see
    `legato.protos.prefix_hash`).

    A reservation names no block: it takes blocks off what others may take, until `*_reserved`
    turns it into held ones or `unreserve` gives it up.

    The event loop reserves and frees while the engine thread allocates, so every method takes the
    lock. Each costs the blocks that it touches, whatever the pool's size; nothing is built for a
    block before its first use.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self._total = num_blocks
        # Last in, first out: memory that has been touched is used again before new one is.
        self._returned: list[int] = []
        self._num_touched = 0  # blocks from here on were never used, and are free
        self._references: dict[int, int] = {}  # of the held ones
        self._index = PrefixIndex()
        self._reserved = 0
        self._prefix_blocks_asked = self._prefix_blocks_hit = self._evictions = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Blocks of the pool, whatever their state."""
        return self._total

    def usage(self) -> PoolUsage:
        """All counts, taken at one moment."""
        with self._lock:
            return PoolUsage(
                total=self._total,
                free=len(self._returned) + self._total - self._num_touched,
                cached=len(self._index.cached),
                held=len(self._references),
                reserved=self._reserved,
            )

    def counters(self) -> PoolCounters:
        """All counters, taken at one moment."""
        with self._lock:
            return PoolCounters(self._prefix_blocks_asked, self._prefix_blocks_hit, self._evictions)

    def reserve(self, num_blocks: int) -> bool:
        """Promises `num_blocks`; False, and nothing is promised, where fewer are available."""
        _check_count(num_blocks)
        with self._lock:
            if num_blocks > self._available():
                return False
            self._reserved += num_blocks
            return True

    def unreserve(self, num_blocks: int) -> None:
        """Gives a promise up."""
        _check_count(num_blocks)
        with self._lock:
            self._check_promised(num_blocks)
            self._reserved -= num_blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes available blocks; None, and nothing is taken, where there are fewer."""
        _check_count(num_blocks)
        with self._lock:
            if num_blocks > self._available():
                return None
            return self._take(num_blocks)

    def allocate_reserved(self, num_blocks: int) -> list[int]:
        """Takes blocks that were promised: this cannot fail for want of room."""
        _check_count(num_blocks)
        with self._lock:
            self._check_promised(num_blocks)
            self._reserved -= num_blocks
            return self._take(num_blocks)

    def acquire(
        self, block_hashes: Sequence[bytes], num_blocks: int
    ) -> tuple[list[int], int] | None:
        """Takes `num_blocks` for a sequence whose full blocks have these hashes.

        Of its first blocks, as many as are registered one after the other are shared; the rest is
        new. A shared block that was cached takes room as a new one does, one that is held does not.

        Returns:
            The blocks in order, and how many of them are shared; None, and nothing is taken,
            where that does not fit.
        """
        return self.acquire_reserved(block_hashes, num_blocks, 0)

    def acquire_reserved(
        self, block_hashes: Sequence[bytes], num_blocks: int, reserved: int
    ) -> tuple[list[int], int] | None:
        """`acquire` by the holder of a promise of `reserved` blocks, which is given up with it.

        With `num_blocks` up to `reserved` this cannot fail for want of room. Where it fails, the
        promise stands.
        """
        _check_count(num_blocks)
        _check_count(reserved)
        with self._lock:
            self._check_promised(reserved)
            shared = self._index.match(block_hashes, num_blocks)
            _check_unique(shared)
            num_new = num_blocks - len(shared)
            num_cached = sum(block not in self._references for block in shared)
            if num_new + num_cached > self._available() + reserved:
                return None
            self._reserved -= reserved
            self._refer(shared)
            self._prefix_blocks_asked += min(len(block_hashes), num_blocks)
            self._prefix_blocks_hit += len(shared)
            return shared + self._take(num_new), len(shared)

    def count_cached_prefix(self, block_hashes: Sequence[bytes]) -> int:
        """How many first blocks `acquire` would share now, held ones included. Only a look."""
        with self._lock:
            return len(self._index.match(block_hashes, len(block_hashes)))

    def register(self, block: int, block_hash: bytes) -> bool:
        """Says that a held block is full and will not change, and makes it findable.

        Returns:
            Whether it is findable now: where another block has this hash already, that one stays
            and this one is not registered.

        Raises:
            ValueError: the block is not held, or is registered under another hash.
        """
        with self._lock:
            self._check_held([block], "registered")
            return self._index.register(block, block_hash)

    def unregister(self, blocks: Sequence[int]) -> None:
        """Makes held blocks unfindable, whoever else holds them; no matter for unregistered ones.

        Raises:
            ValueError: a block is not held, or stands twice in `blocks`; nothing is changed.
        """
        with self._lock:
            self._check_held(blocks, "unregistered")
            for block in blocks:
                if block in self._index:
                    self._index.unregister(block)

    def share(self, blocks: Sequence[int]) -> None:
        """Refers once more to each.

        Raises:
            ValueError: a block is not held, or stands twice in `blocks`; nothing is changed.
        """
        with self._lock:
            self._check_held(blocks, "shared")
            self._refer(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each; `blocks` in the order of the sequence.

        Raises:
            ValueError: a block is not held, or stands twice in `blocks`; nothing is freed.
        """
        with self._lock:
            self._check_held(blocks, "freed")
            # From the end: deep blocks are evicted first, and free ones go out in this order again.
            for block in reversed(blocks):
                self._drop(block)

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may change it: nobody else refers to it or may find it."""
        with self._lock:
            return self._is_writable(block)

    def make_writable(self, block: int) -> bool:
        """Forgets a held block's hash, if the caller holds the only reference to it.

        Returns:
            Whether the caller may change it now; where not, nothing has changed.

        Raises:
            ValueError: the block is not held.
        """
        with self._lock:
            self._check_held([block], "made writable")
            if self._references[block] > 1:
                return False
            if block in self._index:
                self._index.unregister(block)
            return True

    def replace(self, block: int) -> int | None:
        """The block to write to in place of this held one: copy on write.

        A writable block comes back as it is. Else a new one is taken, and the caller's reference
        to the old one is gone: the caller copies the contents before anything else is allocated.
        Where another thread may allocate meanwhile: `allocate`, copy, `free` the old one instead.

        Returns:
            The block; None, and nothing has changed, where none is available.

        Raises:
            ValueError: the block is not held.
        """
        with self._lock:
            self._check_held([block], "replaced")
            if self._is_writable(block):
                return block
            if self._available() < 1:
                return None
            [new] = self._take(1)
            self._drop(block)
            return new

    def prefix_changes(self, number: int, limit: int) -> tuple[dict[int, bool], int] | None:
        """What became findable and what not any more, as `PrefixLog.since` tells it."""
        with self._lock:
            return self._index.log.since(number, limit)

    def findable(self) -> tuple[list[bytes], int]:
        """The hashes of all blocks that are found now, and the number of the next change."""
        with self._lock:
            return self._index.hashes(), self._index.log.end

    def forget_cached(self) -> None:
        """All cached blocks become free; held ones stay registered."""
        with self._lock:
            self._returned.extend(self._index.evict_all())

    def references(self) -> dict[int, int]:
        """How many refer to each held block. A copy, for checks."""
        with self._lock:
            return dict(self._references)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one state, and all books agree."""
        with self._lock:
            touched = [*self._returned, *self._index.cached, *self._references]
            assert len(touched) == len(set(touched)), "a block is in two states"
            assert set(touched) == set(range(self._num_touched)), "a block is lost"
            assert self._num_touched <= self._total, "there are blocks beyond the pool's end"
            assert all(n > 0 for n in self._references.values()), "held without a reference"
            self._index.check_integrity(self._references)
            assert 0 <= self._reserved <= self._total - len(self._references), (
                "more is promised than there is"
            )

    # Below: with the lock held.

    def _available(self) -> int:
        return self._total - len(self._references) - self._reserved

    def _take(self, num_blocks: int) -> list[int]:
        """Free blocks, then evicted ones; the caller knows that there are as many."""
        blocks = []
        for _ in range(num_blocks):
            if self._returned:
                block = self._returned.pop()
            elif self._num_touched < self._total:
                block = self._num_touched
                self._num_touched += 1
            else:
                block = self._index.evict()
                self._evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _refer(self, blocks: Iterable[int]) -> None:
        """One more reference to held or cached blocks."""
        for block in blocks:
            self._index.unpark(block)
            self._references[block] = self._references.get(block, 0) + 1

    def _drop(self, block: int) -> None:
        """One reference less."""
        if self._references[block] > 1:
            self._references[block] -= 1
            return
        del self._references[block]
        if block in self._index:
            self._index.park(block)
        else:
            self._returned.append(block)

    def _is_writable(self, block: int) -> bool:
        return self._references.get(block) == 1 and block not in self._index

    def _check_held(self, blocks: Sequence[int], done: str) -> None:
        _check_unique(blocks)
        if strange := [block for block in blocks if block not in self._references]:
            raise ValueError(f"blocks {sorted(strange)} are not held and cannot be {done}")

    def _check_promised(self, num_blocks: int) -> None:
        if num_blocks > self._reserved:
            raise ValueError(f"{num_blocks} blocks are not promised, only {self._reserved} are")


def _check_unique(blocks: Sequence[int]) -> None:
    if len(set(blocks)) != len(blocks):
        raise ValueError(f"a block stands twice in the list: {sorted(blocks)}")


def _check_count(num_blocks: int) -> None:
    if num_blocks < 0:
        raise ValueError(f"num_blocks must not be negative, got {num_blocks}")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` rows."""
    return -(-num_tokens // block_size)
