"""PrefixIndex: under which hash a block is found, and which found ones are to be evicted first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from legato.worker.kv.prefix_log import PrefixLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set


class PrefixIndex:
    """A one-to-one map of hashes and blocks, and the order of those of them that nobody holds.

    Every call is O(1) or O(blocks given). It has no lock: the pool that owns it has one.
    """

    def __init__(self) -> None:
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to evict first
        self.log = PrefixLog()

    @property
    def cached(self) -> Set[int]:
        """The registered blocks that nobody holds."""
        return self._cached.keys()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def register(self, block: int, block_hash: bytes) -> bool:
        """Whether the block is found under this hash now, and no other one was there before.

        Raises:
            ValueError: the block is registered under another hash.
        """
        if self._hash_of.get(block, block_hash) != block_hash:
            raise ValueError(f"block {block} is registered under another hash")
        if self._block_of.setdefault(block_hash, block) != block:
            return False
        if block not in self._hash_of:
            self._hash_of[block] = block_hash
            self.log.note(block_hash, added=True)
        return True

    def hashes(self) -> list[bytes]:
        """All that are registered."""
        return list(self._block_of)

    def match(self, block_hashes: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest registered prefix, at most `limit`."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None or len(blocks) == limit:
                break
            blocks.append(block)
        return blocks

    def park(self, block: int) -> None:
        """Nobody holds this registered block any more: it is evicted after those parked before."""
        assert block in self._hash_of, "not registered"
        self._cached[block] = None

    def unpark(self, block: int) -> None:
        """Somebody holds the block, again or anyway."""
        self._cached.pop(block, None)

    def unregister(self, block: int) -> None:
        """A registered block that somebody holds is not found any more."""
        assert block not in self._cached, "nobody holds the block"
        self._unregister(block)

    def evict(self) -> int:
        """Takes out the block that was parked first; there is one."""
        block, _ = self._cached.popitem(last=False)
        self._unregister(block)
        return block

    def evict_all(self) -> list[int]:
        """Takes out every block that is parked."""
        blocks = list(self._cached)
        self._cached.clear()
        for block in blocks:
            self._unregister(block)
        return blocks

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless every block has one hash and is either cached or held."""
        assert len(self._hash_of) == len(self._block_of), "a hash has lost its block"
        for block, block_hash in self._hash_of.items():
            assert self._block_of.get(block_hash) == block, "a block and its hash disagree"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block has no hash"
        idle = self._hash_of.keys() - set(held)
        assert idle <= self._cached.keys(), "a free block is registered"

    def _unregister(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.log.note(block_hash, added=False)
