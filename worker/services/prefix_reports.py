"""PrefixReports: what one watcher is told of a pool's findable blocks, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import worker_pb2
from legato.worker.kv.prefix_log import short

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool

MAX_CHANGES = 4096  # of one report: 32 KiB


class PrefixReports:
    """Of one stream of reports. Costs what has changed since the last piece; one that falls behind
    the pool's log is told everything anew.
    """

    def __init__(self, pool: BlockPool, max_changes: int = MAX_CHANGES) -> None:
        self._pool = pool
        self._max_changes = max_changes
        self._next: int | None = None  # of the pool's changes; None: begin with all there is
        self._rest: list[int] = []  # of all there is, what was not told yet
        self._sequence = 0

    def take(self) -> worker_pb2.PrefixChanges | None:
        """The next piece; None: there is nothing new."""
        changes = worker_pb2.PrefixChanges(sequence=self._sequence)
        if not self._rest:
            news = None
            if self._next is not None:
                news = self._pool.prefix_changes(self._next, self._max_changes)
            if news is None:
                hashes, self._next = self._pool.findable()
                self._rest = [short(block_hash) for block_hash in hashes]
                changes.reset = True
            else:
                of_hash, self._next = news
                changes.added.extend(h for h, added in of_hash.items() if added)
                changes.removed.extend(h for h, added in of_hash.items() if not added)
        if self._rest:
            changes.added.extend(self._rest[: self._max_changes])
            del self._rest[: self._max_changes]
        if not (changes.reset or changes.added or changes.removed):
            return None
        self._sequence += 1
        return changes
