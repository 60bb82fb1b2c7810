"""BlockPool under random lives of sequences; and the same machine finds what is planted in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from block_pool_machine import PoolMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_EXAMPLES = int(os.environ.get("LEGATO_PROPERTY_EXAMPLES", "400"))
STEPS = 50  # an example


def budget(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_any_life_of_any_sequences_keeps_every_invariant() -> None:
    before = PoolMachine.num_steps
    run_state_machine_as_test(PoolMachine, settings=budget(NUM_EXAMPLES))
    assert PoolMachine.num_steps - before > NUM_EXAMPLES * STEPS / 4  # it did run


class FreesTwice(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free(list(dict.fromkeys(blocks)))


class FreesWhatIsNotHeld(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free([block for block in blocks if block in self._references])


class EvictsHeldBlocks(BlockPool):
    def _take(self, num_blocks: int) -> list[int]:
        registered = [block for block in self._references if block in self._index]
        if num_blocks and registered and not self._returned and self._num_touched == self._total:
            del self._references[registered[0]]
            self._index._unregister(registered[0])
            self._returned.append(registered[0])
        return super()._take(num_blocks)


class EvictsShallowBlocksFirst(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free(list(reversed(blocks)))


class EvictsTheLatest(BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._index = LatestFirst()


class LatestFirst(PrefixIndex):
    def evict(self) -> int:
        block, _ = self._cached.popitem(last=True)
        self._unregister(block)
        return block


class LetsADuplicateReplace(BlockPool):
    def register(self, block: int, block_hash: bytes) -> bool:
        self._check_held([block], "registered")
        self._index._hash_of[block] = block_hash
        self._index._block_of[block_hash] = block
        return True


class FreesWhatIsStillRegistered(BlockPool):
    def _drop(self, block: int) -> None:
        super()._drop(block)
        if block in self._index.cached:
            self._index.unpark(block)
            self._returned.append(block)


class EvictsAndLeavesTheHash(BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._index = KeepsHashes()


class KeepsHashes(PrefixIndex):
    def _unregister(self, block: int) -> None:
        pass


class PromisesOneTooMany(BlockPool):
    def _available(self) -> int:
        return super()._available() + (1 if self._reserved else 0)


class ForgetsThatCachedBlocksTakeRoom(BlockPool):
    def acquire_reserved(
        self, block_hashes: Sequence[bytes], num_blocks: int, reserved: int
    ) -> tuple[list[int], int] | None:
        num_shared = self.count_cached_prefix(block_hashes[:num_blocks])
        if num_blocks - num_shared > self.usage().available + reserved:
            return None
        self._reserved, kept = 0, self._reserved - reserved
        got = super().acquire_reserved(block_hashes, num_blocks, 0)
        self._reserved = kept
        return got


class WritesIntoSharedBlocks(BlockPool):
    def _is_writable(self, block: int) -> bool:
        return block in self._references and block not in self._index


class WritesIntoRegisteredBlocks(BlockPool):
    def _is_writable(self, block: int) -> bool:
        return self._references.get(block) == 1


class LeaksTheReplacedBlock(BlockPool):
    def replace(self, block: int) -> int | None:
        new = super().replace(block)
        if new is not None and new != block and block in self._references:
            self._references[block] += 1
        return new


class MatchesAcrossAHole(BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._index = SkipsHoles()


class SkipsHoles(PrefixIndex):
    def match(self, block_hashes: Sequence[bytes], limit: int) -> list[int]:
        return [self._block_of[h] for h in block_hashes if h in self._block_of][:limit]


class LosesAPromise(BlockPool):
    def allocate_reserved(self, num_blocks: int) -> list[int]:
        blocks = super().allocate_reserved(num_blocks)
        self._reserved += 1 if num_blocks > 2 else 0
        return blocks


PLANTED = [
    FreesTwice,
    FreesWhatIsNotHeld,
    EvictsHeldBlocks,
    EvictsShallowBlocksFirst,
    EvictsTheLatest,
    LetsADuplicateReplace,
    FreesWhatIsStillRegistered,
    EvictsAndLeavesTheHash,
    PromisesOneTooMany,
    ForgetsThatCachedBlocksTakeRoom,
    WritesIntoSharedBlocks,
    WritesIntoRegisteredBlocks,
    LeaksTheReplacedBlock,
    MatchesAcrossAHole,
    LosesAPromise,
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_the_machine_finds_a_planted_bug_without_the_pools_own_check(
    planted: type[BlockPool],
) -> None:
    class Machine(PoolMachine):
        pool_class = planted

        def check_pool(self) -> None:
            pass

    # Always the same examples: a bug that is found once is found every time. The first will do.
    find = settings(
        budget(1000),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(Machine, settings=find)
