"""PoolMachine: random lives of sequences over a BlockPool, each answer checked with PoolModel."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest
from block_pool_model import BLOCK_SIZE, Holder, PoolModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.protos.prefix_hash import PrefixHasher
from legato.worker.kv.block_pool import BlockPool, PoolCounters, PoolUsage, blocks_for

# Two tokens in blocks of two: prefixes meet by chance, and more so by `known`.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
WHICH = st.integers(0, 99)  # modulo how many there are
HASHER = PrefixHasher("model", BLOCK_SIZE, kv_kind="rows")

has_holders = precondition(lambda self: bool(self.model.holders))
has_promises = precondition(lambda self: bool(self.model.promises))
has_preempted = precondition(lambda self: bool(self.preempted))


class PoolMachine(RuleBasedStateMachine):
    """Subclasses name another pool, to see whether the machine finds what is wrong with it."""

    pool_class: ClassVar[type[BlockPool]] = BlockPool
    num_steps: ClassVar[int] = 0  # of all examples together

    @initialize(total=st.integers(2, 16))
    def make(self, total: int) -> None:
        self.pool = self.pool_class(total)
        self.model = PoolModel(total)
        self.preempted: list[list[int]] = []
        self.ended: list[list[int]] = []

    def holder(self, which: int) -> Holder:
        return self.model.holders[which % len(self.model.holders)]

    def enter(self, tokens: list[int], full: bool, promise: int | None = None) -> bool:
        """Acquires, computes what was not shared, and if `full` registers it."""
        holder = Holder(list(tokens))
        hashes = HASHER.block_hashes(tokens)
        num_blocks = blocks_for(len(tokens), BLOCK_SIZE)
        if promise is None:
            got = self.pool.acquire(hashes, num_blocks)
        else:
            got = self.pool.acquire_reserved(hashes, num_blocks, promise)
            assert got is not None or num_blocks > promise, "a promise was not kept"
        if not self.model.acquire(holder, got, promise or 0):
            return False
        if promise is not None:
            self.model.promises.remove(promise)
        assert got is not None
        for position in range(got[1] * BLOCK_SIZE, len(tokens)):
            self.model.write(holder, position)
        if full:
            self.register_blocks(holder, 0, len(hashes))
        return True

    def register_blocks(self, holder: Holder, first: int, most: int) -> None:
        hashes = HASHER.block_hashes(holder.tokens)
        names = zip(holder.blocks, hashes, holder.full_prefixes(), strict=False)
        for block, block_hash, prefix in list(names)[first : first + most]:
            answer = self.pool.register(block, block_hash)
            assert answer == self.model.register(block, prefix)

    def enter_unseen(self, tokens: list[int], blocks: list[int]) -> None:
        """A sequence that looked nothing up: its blocks may equal others."""
        holder = Holder(list(tokens))
        self.model.take(blocks, blocks_for(len(tokens), BLOCK_SIZE))
        holder.blocks = blocks
        self.model.holders.append(holder)
        for position in range(len(tokens)):
            self.model.write(holder, position)

    @rule(more=st.just([]) | TOKENS, which=WHICH, keep=st.integers(0, 9), full=st.booleans())
    def start(self, more: list[int], which: int, keep: int, full: bool) -> None:
        tokens = self.known(which)[:keep] + more
        if tokens and not self.enter(tokens, full):
            self.make_room()

    @rule(more=st.just([]) | TOKENS, which=WHICH, keep=st.integers(1, 9))
    def start_full(self, more: list[int], which: int, keep: int) -> None:
        self.start(more, which, keep, True)

    def make_room(self) -> None:
        """As a scheduler would: without it most of a life passes in a pool that is full."""
        if self.model.holders:
            self.preempt(0)
        elif self.model.promises:
            self.cancel(0)

    def known(self, which: int) -> list[int]:
        """The tokens of a sequence that lives or has ended: what may be cached."""
        known = [*(holder.tokens for holder in self.model.holders), *self.ended]
        return known[which % len(known)] if known else []

    @has_promises
    @rule(keep=st.integers(1, 9), more=TOKENS, which=WHICH, promise=WHICH)
    def start_promised(self, which: int, keep: int, more: list[int], promise: int) -> None:
        promises = self.model.promises
        self.enter(self.known(which)[:keep] + more, True, promises[promise % len(promises)])

    @rule(tokens=TOKENS)
    def allocate(self, tokens: list[int]) -> None:
        num_blocks = blocks_for(len(tokens), BLOCK_SIZE)
        blocks = self.pool.allocate(num_blocks)
        assert (blocks is not None) == (num_blocks <= self.model.available())
        if blocks is not None:
            self.enter_unseen(tokens, blocks)

    @has_promises
    @rule(tokens=TOKENS, which=WHICH)
    def allocate_promised(self, tokens: list[int], which: int) -> None:
        promise = self.model.promises.pop(which % len(self.model.promises))
        tokens = tokens[: promise * BLOCK_SIZE]
        num_blocks = blocks_for(len(tokens), BLOCK_SIZE)
        blocks = self.pool.allocate_reserved(num_blocks)
        self.enter_unseen(tokens, blocks)
        if promise > num_blocks:
            self.model.promises.append(promise - num_blocks)

    @has_holders
    @rule(which=WHICH, tokens=TOKENS)
    def extend(self, which: int, tokens: list[int]) -> None:
        for token in tokens:
            if not self.append(self.holder(which), token):
                break

    def append(self, holder: Holder, token: int) -> bool:
        """Writes one more row, into a new block or into a copy where others see the last one."""
        num_rows = len(holder.tokens) % BLOCK_SIZE
        if num_rows == 0:
            blocks = self.pool.allocate(1)
            assert (blocks is not None) == (self.model.available() > 0)
            if blocks is None:
                return False
            self.model.take(blocks, 1)
            holder.blocks += blocks
        else:
            old = holder.blocks[-1]
            private, room = self.model.is_private(old), self.model.available() > 0
            block = self.pool.replace(old)
            assert (block is not None) == (private or room)
            if block is None:
                return False
            assert (block == old) == private
            if private:
                del self.model.memory[old][num_rows:]  # of tokens that were taken back
            else:
                rows = self.model.memory[old][:num_rows]
                self.model.take([block], 1)
                self.model.drop(holder, [old])
                holder.blocks[-1] = block
                self.model.memory[block] = rows
        holder.tokens.append(token)
        self.model.write(holder, len(holder.tokens) - 1)
        return True

    @has_holders
    @rule(which=WHICH, keep=st.integers(1, 9), token=st.integers(0, 1))
    def rewrite(self, which: int, keep: int, token: int) -> None:
        """Takes tokens back, and writes another one in their place: into a full block, too."""
        holder = self.holder(which)
        if keep >= len(holder.tokens):
            return
        num_kept = blocks_for(keep, BLOCK_SIZE)
        self.pool.free(holder.blocks[num_kept:])
        self.model.release(holder, num_kept)
        del holder.tokens[keep:]
        self.append(holder, token)

    @has_holders
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        holder = self.holder(which)
        self.pool.share(holder.blocks)
        self.model.holders.append(Holder(list(holder.tokens), list(holder.blocks)))

    @has_holders
    @rule(which=WHICH, first=st.integers(0, 2), most=st.integers(1, 4))
    def register(self, which: int, first: int, most: int) -> None:
        self.register_blocks(self.holder(which), first, most)

    @has_holders
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        holder = self.holder(which)
        self.ended = [*self.ended[-5:], list(holder.tokens)]
        self.pool.free(holder.blocks)
        self.model.release(holder)

    @has_holders
    @rule(which=WHICH)
    def preempt(self, which: int) -> None:
        self.preempted.append(self.holder(which).tokens)
        self.release(which)

    @has_preempted
    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        index = which % len(self.preempted)
        if self.enter(self.preempted[index], full=True):
            del self.preempted[index]
        else:
            self.make_room()

    @rule(num_blocks=st.integers(1, 6), nearly_all=st.booleans())
    def reserve(self, num_blocks: int, nearly_all: bool) -> None:
        if nearly_all:
            num_blocks = max(1, self.model.available() + 2 - num_blocks)
        fits = num_blocks <= self.model.available()
        assert self.pool.reserve(num_blocks) == fits
        if fits:
            self.model.promises.append(num_blocks)

    @has_promises
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        self.pool.unreserve(self.model.promises.pop(which % len(self.model.promises)))

    @rule(spare=st.integers(0, 9))
    def squeeze(self, spare: int) -> None:
        """All that is available, but a few, comes and goes: much that was cached is evicted."""
        num_blocks = max(0, self.model.available() - spare)
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        self.model.take(blocks, num_blocks)
        for block in blocks:
            del self.model.memory[block]
        self.pool.free(blocks)

    @rule(sure=st.sampled_from([True, False, False, False]))
    def forget(self, sure: bool) -> None:
        if not sure:  # else too little would ever be found
            return
        self.pool.forget_cached()
        self.model.forget_parked()

    @rule(tokens=TOKENS)
    def look(self, tokens: list[int]) -> None:
        holder = Holder(tokens)
        found = self.pool.count_cached_prefix(HASHER.block_hashes(tokens))
        assert found == len(self.model.matching(holder.full_prefixes(), len(tokens)))

    @rule(which=WHICH, block=st.integers(-1, 16))
    def misuse(self, which: int, block: int) -> None:
        """Each of these is an error, and leaves all as it was (the invariants see to that)."""
        held = sorted(self.model.held())
        wrong = [block] if block not in held else [block, block]
        some = [held[which % len(held)]] if held else []
        for call in (self.pool.free, self.pool.share):
            with pytest.raises(ValueError, match=r"twice|not held"):
                call([*(b for b in some if b != block), *wrong])
        if block not in held:
            with pytest.raises(ValueError, match="not held"):
                self.pool.register(block, b"x")
            with pytest.raises(ValueError, match="not held"):
                self.pool.replace(block)
        with pytest.raises(ValueError, match="not promised"):
            self.pool.allocate_reserved(sum(self.model.promises) + 1)

    @invariant()
    def states_partition_the_blocks(self) -> None:
        PoolMachine.num_steps += 1
        self.check_pool()
        usage, model = self.pool.usage(), self.model
        num_held, num_parked = len(model.held()), len(model.parked)
        assert usage.free + usage.cached + usage.held == usage.total
        assert usage == PoolUsage(
            total=model.total,
            free=model.total - num_held - num_parked,
            cached=num_parked,
            held=num_held,
            reserved=sum(model.promises),
        )
        assert usage.available == model.available() >= 0
        assert self.pool.counters() == PoolCounters(model.asked, model.hits, model.evictions)

    def check_pool(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def nobody_sees_strange_rows(self) -> None:
        self.model.check_contents()

    @invariant()
    def no_block_has_two_writers(self) -> None:
        for block in range(self.model.total):
            assert self.pool.is_writable(block) == self.model.is_private(block)

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None or not hasattr(self, "model"):
            return  # a step has failed: what fails here because of it would hide it
        while self.model.holders:
            self.release(0)
        while self.model.promises:
            self.cancel(0)
        assert self.pool.usage().held == self.pool.usage().reserved == 0
        self.check_pool()
