"""PrefixMap: which worker holds which blocks of KV, as their reports tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.protos import worker_pb2

# Of one worker: what is more is not remembered. 16 MiB, for 4 million tokens in blocks of 16.
MAX_BLOCKS = 1 << 18


class PrefixMap:
    """A worker that has told nothing, or whose reports have a gap, holds nothing."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, set[int]] = {}
        self._next: dict[str, int] = {}  # the sequence number that is to come

    def note(self, worker_id: str, changes: worker_pb2.PrefixChanges) -> None:
        """Takes one report's changes."""
        if changes.reset:
            self._held[worker_id] = set()
        elif self._next.get(worker_id) != changes.sequence:
            self.forget(worker_id)
            return
        self._next[worker_id] = changes.sequence + 1
        held = self._held[worker_id]
        held.difference_update(changes.removed)
        room = self._max_blocks - len(held)
        held.update(changes.added if len(changes.added) <= room else changes.added[: max(0, room)])

    def forget(self, worker_id: str) -> None:
        """The worker has gone, or begins anew."""
        self._held.pop(worker_id, None)
        self._next.pop(worker_id, None)

    def holds_any(self, worker_id: str) -> bool:
        """Whether it is worth asking."""
        return bool(self._held.get(worker_id))

    def held_blocks(self, worker_id: str, block_hashes: Sequence[int]) -> int:
        """How many first blocks of a prompt are there."""
        held = self._held.get(worker_id)
        if not held:
            return 0
        count = 0
        for block_hash in block_hashes:
            if block_hash not in held:
                break
            count += 1
        return count
