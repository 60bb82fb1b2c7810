"""DecodeInputs: the memory that a captured decode step reads, written anew before each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.attention_plan import AttentionPlan
from legato.worker.forward import ForwardBatch

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import Empty
    from legato.worker.scheduling.step import StepPart
    from legato.worker.sequence import Sequence
    from legato.worker.unread import UnreadTokens

_TOKENS, _POSITIONS, _SLOTS = range(3)


class DecodeInputs:
    """For steps of one new token a sequence, up to `capacity` sequences.

    On a CPU the step reads what `fill` writes. For a device `fill` writes to pinned memory and
    queues copies: two sets of it take turns, and one is written again only when its copies are
    done.
    """

    def __init__(
        self,
        capacity: int,
        max_blocks: int,
        block_size: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        """`max_blocks`: of one sequence. `spare_block` belongs to none: rows that only fill a step
        up write there.
        """
        self.capacity = capacity
        self._block_size = block_size
        self._spare_block = spare_block
        self._device = device
        self._width = max_blocks
        self._inputs = _Memory(capacity, self._width, device)
        self._staging: list[_Staging] = []
        if device.type == "cuda":
            self._staging = [_Staging(capacity, self._width) for _ in range(2)]

    def fill(
        self, parts: list[StepPart], num_rows: int, unread: UnreadTokens | None = None
    ) -> None:
        """Writes one row a part, in order, and spare rows up to `num_rows`.

        Input tokens that the CPU does not know yet come from `unread`.
        """
        memory = self._inputs
        if self._staging:
            staging = self._staging.pop(0)
            self._staging.append(staging)
            staging.copied.synchronize()
            memory = staging.memory
        unread_places = self._write(memory, parts, num_rows)
        if self._staging:
            self._inputs.copy_rows(memory, num_rows)
            staging.copied.record()
        if unread_places:
            assert unread is not None, "a step reads tokens that were never sampled"
            unread.copy_into(self._inputs.rows[_TOKENS], unread_places)

    def _write(
        self, memory: _Memory, parts: list[StepPart], num_rows: int
    ) -> list[tuple[int, Sequence]]:
        """Returns the rows whose token is unread."""
        size = self._block_size
        unread_places = []
        for row, part in enumerate(parts):
            sequence = part.sequence
            assert sequence.lease is not None, "scheduled without blocks"
            blocks, position = sequence.lease.blocks, sequence.num_computed
            used = position // size + 1
            if position < len(sequence.token_ids):
                memory.numbers[_TOKENS, row] = sequence.token_ids[position]
            else:
                unread_places.append((row, sequence))
            memory.numbers[_POSITIONS, row] = position
            memory.numbers[_SLOTS, row] = blocks[used - 1] * size + position % size
            memory.lengths[row] = position + 1
            memory.blocks[row, :used] = blocks[:used]
        for row in range(len(parts), num_rows):
            memory.numbers[:, row] = (0, 0, self._spare_block * size)
            memory.lengths[row] = 1
            memory.blocks[row, 0] = self._spare_block
        return unread_places

    def batch(self, num_rows: int, max_blocks: int, empty: Empty) -> ForwardBatch:
        """The first rows as a batch that asks for all logits; shares this memory.

        `max_blocks`: of one sequence, at most; kernels may size their grid by it.
        """
        device = self._device
        return ForwardBatch(
            token_ids=self._inputs.rows[_TOKENS, :num_rows],
            positions=self._inputs.rows[_POSITIONS, :num_rows],
            slots=self._inputs.rows[_SLOTS, :num_rows],
            plan=AttentionPlan(
                query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
                context_lens=self._inputs.context_lens[:num_rows],
                block_table=self._inputs.block_table[:num_rows, : min(max_blocks, self._width)],
                block_size=self._block_size,
                max_queries=1,
            ),
            logit_rows=torch.arange(num_rows, device=device),
            empty=empty,
        )


class _Memory:
    """The arrays, and on the CPU numpy's names for them: it writes small things quicker."""

    def __init__(
        self, capacity: int, width: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.rows = zeros(3, capacity, dtype=torch.int64)  # token ids, positions, slots
        self.context_lens = zeros(capacity, dtype=torch.int32)
        self.block_table = zeros(capacity, width, dtype=torch.int32)
        if device.type == "cpu":
            self.numbers = self.rows.numpy()
            self.lengths = self.context_lens.numpy()
            self.blocks = self.block_table.numpy()

    def copy_rows(self, source: _Memory, num_rows: int) -> None:
        """Queues copies from pinned memory."""
        self.rows[:, :num_rows].copy_(source.rows[:, :num_rows], non_blocking=True)
        self.context_lens[:num_rows].copy_(source.context_lens[:num_rows], non_blocking=True)
        self.block_table[:num_rows].copy_(source.block_table[:num_rows], non_blocking=True)


class _Staging:
    """Pinned memory, and when the device has taken what was written there."""

    def __init__(self, capacity: int, width: int) -> None:
        self.memory = _Memory(capacity, width, torch.device("cpu"), pinned=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
