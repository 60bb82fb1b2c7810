"""GeneratedBlocks: makes the KV blocks findable that a decode worker has filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.sequence import Sequence


class GeneratedBlocks:
    """A part of CapacityScheduler. A conversation's next turn begins with this prompt and answer.

    A block is registered when the device has written its last row: from then on the sequence
    writes behind it. The tokens of these rows are known then, for a row's token is read before
    the step that writes the row is settled.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def begin(self, sequence: Sequence) -> None:
        """Whoever wrote the KV that is there has registered its full blocks."""
        sequence.num_settled = sequence.num_computed
        sequence.num_registered = sequence.num_computed // self._block_size

    def note_rows(self, sequence: Sequence, num_rows: int) -> None:
        """So many more of its rows are written."""
        sequence.num_settled += num_rows
        num_full = sequence.num_settled // self._block_size
        # One that has yielded its blocks meanwhile, or has ended, may not own them any more.
        running = sequence.state is SequenceState.RUNNING
        if sequence.hasher is None or not running or num_full <= sequence.num_registered:
            return
        assert sequence.lease is not None, "running without blocks"
        hashes = sequence.block_hashes
        sequence.hasher.extend(hashes, sequence.token_ids)
        for place in range(sequence.num_registered, num_full):
            self._pool.register(sequence.lease.blocks[place], hashes[place])
        sequence.num_registered = num_full
