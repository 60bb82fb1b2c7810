"""BlockPool: which KV blocks are free, promised or held. It knows no tensor."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PoolUsage:
    """Counts of blocks at one moment; free + reserved + held == total."""

    total: int
    free: int
    reserved: int
    held: int


class BlockPool:
    """Counts and hands out blocks.

    A block is free or held. A reservation names no block: it takes blocks off what `allocate` may
    give out, until `allocate_reserved` turns it into held ones or `unreserve` gives it up.

    The event loop reserves and frees while the engine thread allocates, so every method takes the
    lock; none of them does more than a few list operations under it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self._total = num_blocks
        # Last in, first out: memory that has been touched is used again before new one is.
        self._idle = deque(range(num_blocks))
        self._held: set[int] = set()
        self._reserved = 0
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
                free=len(self._idle) - self._reserved,
                reserved=self._reserved,
                held=len(self._held),
            )

    def reserve(self, num_blocks: int) -> bool:
        """Promises `num_blocks`; False, and nothing is promised, where fewer are free."""
        _check_count(num_blocks)
        with self._lock:
            if num_blocks > len(self._idle) - self._reserved:
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
        """Takes free blocks; None, and nothing is taken, where there are fewer."""
        _check_count(num_blocks)
        with self._lock:
            if num_blocks > len(self._idle) - self._reserved:
                return None
            return self._take(num_blocks)

    def allocate_reserved(self, num_blocks: int) -> list[int]:
        """Takes blocks that were promised: this cannot fail for want of room."""
        _check_count(num_blocks)
        with self._lock:
            self._check_promised(num_blocks)
            self._reserved -= num_blocks
            return self._take(num_blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Gives held blocks back.

        Raises:
            ValueError: a block is not held, or stands twice in `blocks`; nothing is freed.
        """
        with self._lock:
            unique = set(blocks)
            if len(unique) != len(blocks):
                raise ValueError(f"a block stands twice in the list to free: {sorted(blocks)}")
            if strange := unique - self._held:
                raise ValueError(f"blocks {sorted(strange)} are not held and cannot be freed")
            self._held -= unique
            self._idle.extendleft(
                reversed(blocks)
            )  # the last ones freed go out first: their pages are there

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one state."""
        with self._lock:
            idle = set(self._idle)
            assert len(idle) == len(self._idle), "a block is idle twice"
            assert not idle & self._held, "a block is idle and held"
            assert idle | self._held == set(range(self._total)), "a block is lost"
            assert 0 <= self._reserved <= len(idle), "more is promised than there is"

    def _take(self, num_blocks: int) -> list[int]:
        blocks = [self._idle.popleft() for _ in range(num_blocks)]
        self._held.update(blocks)
        return blocks

    def _check_promised(self, num_blocks: int) -> None:
        if num_blocks > self._reserved:
            raise ValueError(f"{num_blocks} blocks are not promised, only {self._reserved} are")


def _check_count(num_blocks: int) -> None:
    if num_blocks < 0:
        raise ValueError(f"num_blocks must not be negative, got {num_blocks}")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` rows."""
    return -(-num_tokens // block_size)
