"""PrefillScheduler: which prompt tokens the next forward pass computes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import blocks_for
from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import FinishReason, SequenceState

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.sequence import Sequence


class PrefillScheduler:
    """First come, first served, under a token budget.

    A step takes prompts in order of arrival until `chunk_tokens` are planned; the last one may be
    cut there and goes on first in the next step. A prompt starts only when all its blocks are
    free, so a started one never waits for another and prefill cannot deadlock half-way. The first
    that does not fit holds back those behind it: letting them pass would starve it.

    Full blocks that another prompt with the same beginning left behind are shared, not computed
    again, but for a prompt whose tokens' logprobs are wanted: of what is not computed there are no
    logits. Those that this one fills can be found by the next. A prompt without usable logits takes
    all its blocks out of the cache: NaN may be in them, even before the token that brought it.
    """

    def __init__(self, pool: BlockPool, block_size: int, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self._pool = pool
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # started, in order; none is finished
        self._waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Prompts not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts started and not finished."""
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of both that are still to compute."""
        return self._waiting_tokens

    @property
    def num_swapped(self) -> int:
        """0: a started prompt keeps its blocks."""
        return 0

    @property
    def num_preemptions(self) -> int:
        """0."""
        return 0

    def add(self, sequence: Sequence) -> None:
        """Queues a prompt that the pool can hold (the caller has checked)."""
        assert blocks_for(len(sequence.token_ids), self._block_size) <= self._pool.total
        self._waiting.append(sequence)
        self._waiting_tokens += _remaining(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a prompt: queued, between two of its chunks, or computed and broken."""
        if sequence.finish_reason is FinishReason.BROKEN and sequence.lease is not None:
            self._pool.unregister(sequence.lease.blocks)
        if sequence.state is SequenceState.DONE:
            return
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        self._waiting_tokens -= _remaining(sequence)
        sequence.move_to(SequenceState.DONE)

    def schedule(self, now: float) -> Step | None:
        """Started prompts first, then as many waiting ones as budget and blocks allow."""
        budget = self._chunk_tokens
        parts: list[StepPart] = []
        for sequence in self._running:
            if budget == 0:
                break
            count = min(budget, _remaining(sequence))
            parts.append(StepPart(sequence, count))
            budget -= count
        while budget > 0 and self._waiting:
            sequence = self._waiting[0]
            lease = self._lease(sequence)
            if lease is None:
                break
            self._waiting.popleft()
            sequence.lease = lease
            sequence.move_to(SequenceState.RUNNING)
            self._running.append(sequence)
            count = min(budget, _remaining(sequence))
            parts.append(StepPart(sequence, count))
            budget -= count
        return Step(parts) if parts else None

    def commit(self, step: Step) -> None:
        """Moves each prompt on; one whose last token was computed leaves, keeping its blocks."""
        for part in step.parts:
            sequence = part.sequence
            self._register(sequence, part.num_tokens)
            sequence.num_computed += part.num_tokens
            self._waiting_tokens -= part.num_tokens
            if _remaining(sequence) == 0:
                self._running.remove(sequence)
                sequence.move_to(SequenceState.DONE)

    def settle(self, step: Step) -> None:
        """Nothing: what a step has computed is read by later ones only."""

    def _lease(self, sequence: Sequence) -> BlockLease | None:
        """All its blocks, where there is room; what is cached of them counts as computed."""
        # The last token is computed in any case: its logits are what the prompt is for.
        reusable = sequence.block_hashes[: (len(sequence.token_ids) - 1) // self._block_size]
        if sequence.prompt_scores is not None:
            reusable = []
        num_blocks = blocks_for(len(sequence.token_ids), self._block_size)
        found = self._pool.acquire(reusable, num_blocks)
        if found is None:
            return None
        blocks, num_shared = found
        sequence.num_cached = sequence.num_computed = num_shared * self._block_size
        self._waiting_tokens -= sequence.num_cached
        return BlockLease(self._pool, blocks)

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the blocks findable that its next `num_tokens` fill."""
        assert sequence.lease is not None, "computed without blocks"
        first = sequence.num_computed // self._block_size
        end = (sequence.num_computed + num_tokens) // self._block_size
        for block, block_hash in zip(
            sequence.lease.blocks[first:end], sequence.block_hashes[first:end], strict=False
        ):
            self._pool.register(block, block_hash)


def _remaining(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed
