"""PoolModel: what a block pool has to answer, from who holds what and what was written where.

It shares no idea with the pool: no reference counts, no hashes, no lists of free blocks. A block
holds rows; the row of a token is the tuple of all tokens up to it, as KV depends on all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

BLOCK_SIZE = 2
Row = tuple[int, ...]


@dataclass(eq=False)
class Holder:
    """A sequence: its tokens, and the blocks of their rows in order."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)

    def full_prefixes(self) -> list[Row]:
        """The last row of each full block: it names the block's contents."""
        return [row_at(self.tokens, end - 1) for end in block_ends(len(self.tokens))]


def row_at(tokens: list[int], position: int) -> Row:
    return tuple(tokens[: position + 1])


def block_ends(num_tokens: int) -> range:
    return range(BLOCK_SIZE, num_tokens + 1, BLOCK_SIZE)


class PoolModel:
    """Told of every call and its result, says whether the result was right."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.holders: list[Holder] = []
        self.promises: list[int] = []
        self.memory: dict[int, list[Row]] = {}
        self.registered: dict[Row, int] = {}
        self.as_registered: dict[int, list[Row]] = {}
        self.parked: dict[int, tuple[int, int]] = {}  # (when, -depth): the smallest is evicted next
        self.releases = self.asked = self.hits = self.evictions = 0

    def held(self) -> Counter[int]:
        return Counter(block for holder in self.holders for block in holder.blocks)

    def available(self) -> int:
        return self.total - len(self.held()) - sum(self.promises)

    def is_private(self, block: int) -> bool:
        """Only one may see it, so only one may write to it."""
        return self.held()[block] == 1 and block not in self.as_registered

    def matching(self, prefixes: list[Row], limit: int) -> list[int]:
        blocks: list[int] = []
        for prefix in prefixes[:limit]:
            if prefix not in self.registered:
                break
            blocks.append(self.registered[prefix])
        return blocks

    def take(self, new: list[int], num_blocks: int) -> None:
        """The pool handed `new` out: free ones, and where they end the next to evict."""
        held = self.held()
        assert len(set(new)) == len(new) == num_blocks, "not as many blocks as were asked for"
        assert set(new) <= set(range(self.total)), "no block of this pool"
        assert not set(new) & held.keys(), "a held block was handed out"
        num_free = self.total - len(held) - len(self.parked)
        due = sorted(self.parked, key=self.parked.__getitem__)[: max(0, num_blocks - num_free)]
        assert set(new) & self.parked.keys() == set(due), "another block was due for eviction"
        self.evictions += len(due)
        for block in due:
            self._forget(block)
        for block in new:
            self.memory[block] = []

    def acquire(self, holder: Holder, got: tuple[list[int], int] | None, promise: int) -> bool:
        """The pool answered `acquire` for the tokens of `holder`; True if it got its blocks."""
        prefixes = holder.full_prefixes()
        num_blocks = -(-len(holder.tokens) // BLOCK_SIZE)
        shared = self.matching(prefixes, num_blocks)
        held = self.held()
        cost = num_blocks - sum(block in held for block in shared)
        fits = cost <= self.available() + promise
        assert (got is not None) == fits, "room where there is none, or none where there is"
        if got is None:
            return False
        blocks, num_shared = got
        assert num_shared == len(shared), "not the longest registered prefix"
        assert blocks[:num_shared] == shared, "a registered block was passed over"
        for index, block in enumerate(shared):
            first = index * BLOCK_SIZE
            rows = [row_at(holder.tokens, first + i) for i in range(BLOCK_SIZE)]
            assert self.memory[block] == rows, "a match has other contents"
            self.parked.pop(block, None)
        holder.blocks = shared
        self.holders.append(holder)
        self.take(blocks[num_shared:], num_blocks - num_shared)
        holder.blocks = blocks
        self.asked += len(prefixes)
        self.hits += num_shared
        return True

    def write(self, holder: Holder, position: int) -> None:
        """Writes the row of one token, the next of its block."""
        block = holder.blocks[position // BLOCK_SIZE]
        assert self.is_private(block), "a write into a block that others see"
        assert len(self.memory[block]) == position % BLOCK_SIZE, "the rows before are not there"
        self.memory[block].append(row_at(holder.tokens, position))

    def register(self, block: int, prefix: Row) -> bool:
        """Whether this block is the registered one of that prefix now."""
        if self.registered.setdefault(prefix, block) != block:
            return False
        self.as_registered.setdefault(block, list(self.memory[block]))
        return True

    def release(self, holder: Holder, num_kept: int = 0) -> None:
        """Lets go of all blocks but the first ones, and of the holder with the last."""
        self.drop(holder, holder.blocks[num_kept:])
        holder.blocks = holder.blocks[:num_kept]
        if not num_kept:
            self.holders.remove(holder)

    def drop(self, holder: Holder, blocks: list[int]) -> None:
        """`holder` lets go of `blocks`, given in order; its list is the caller's to cut."""
        self.releases += 1
        others = Counter(b for other in self.holders if other is not holder for b in other.blocks)
        for depth, block in enumerate(blocks):
            if others[block]:
                continue
            if block in self.as_registered:
                self.parked[block] = (self.releases, -depth)
            else:
                del self.memory[block]

    def forget_parked(self) -> None:
        for block in list(self.parked):
            self._forget(block)
            del self.memory[block]

    def check_contents(self) -> None:
        """Every sequence finds its rows, and no registered block has changed."""
        for holder in self.holders:
            for position in range(len(holder.tokens)):
                rows = self.memory[holder.blocks[position // BLOCK_SIZE]]
                row = rows[position % BLOCK_SIZE]
                assert row == row_at(holder.tokens, position), "a sequence reads strange rows"
        for block, rows in self.as_registered.items():
            assert self.memory[block] == rows, "a registered block has changed"

    def _forget(self, block: int) -> None:
        del self.parked[block]
        del self.registered[self.as_registered.pop(block)[-1]]
