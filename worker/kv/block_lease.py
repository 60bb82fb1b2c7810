"""BlockLease: one request's blocks, given back only when nobody reads or writes them any more."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.worker.kv.block_pool import BlockPool


class LeaseReleasedError(Exception):
    """The request that owned the blocks is over: they must not be touched."""


class BlockLease:
    """Holds blocks from construction until it is released *and* the last pin is gone.

    Whoever touches the pages pins the lease meanwhile: the engine for as long as the sequence is
    in its schedule, the sender and the receiver around each chunk. `release` refuses new pins at
    once and never waits, so a late chunk can neither write into a block that belongs to someone
    else nor hold up the event loop. All methods may be called from any thread.
    """

    def __init__(self, pool: BlockPool, blocks: list[int]) -> None:
        self.blocks = blocks
        self._pool = pool
        self._pins = 0
        self._released = False
        self._lock = threading.Lock()

    @property
    def released(self) -> bool:
        """True once the owner has let go; a pin may still keep the blocks for a moment."""
        return self._released

    def acquire(self) -> None:
        """Pins; raises LeaseReleasedError after `release`."""
        with self._lock:
            if self._released:
                raise LeaseReleasedError
            self._pins += 1

    def acquire_again(self) -> None:
        """Pins once more what is pinned already, released or not."""
        with self._lock:
            assert self._pins > 0, "not pinned"
            self._pins += 1

    def drop(self) -> None:
        """Unpins; the last one after `release` gives the blocks back."""
        with self._lock:
            assert self._pins > 0, "unpinned more often than pinned"
            self._pins -= 1
            free = self._released and self._pins == 0
        if free:
            self._pool.free(self.blocks)

    @contextmanager
    def pinned(self) -> Iterator[list[int]]:
        """Pins around a `with` block; yields the block ids."""
        self.acquire()
        try:
            yield self.blocks
        finally:
            self.drop()

    def release(self) -> None:
        """Ends the ownership. Idempotent."""
        with self._lock:
            free = not self._released and self._pins == 0
            self._released = True
        if free:
            self._pool.free(self.blocks)
