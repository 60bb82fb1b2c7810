"""KvMover: carries out what a Decision moves: copies within the pool, and swaps with the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.worker.kv.host_slots import HostSlots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

    from legato.worker.kv.cache import KvCache
    from legato.worker.scheduling.decision import Decision

_STAGING_BYTES = 32 << 20  # of the device, taken when the mover is made
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits is moved


class KvMover:
    """Used by the engine's thread, on its stream: the forward pass that follows sees the result,
    and on CUDA nothing waits for the host.

    Blocks are gathered into a buffer on the device, a row each, and from there go to other blocks
    or to the host: a kernel for each layer's K and V, a copy for each run of neighbouring slots.
    Bytes are moved as they are, whatever their dtype.
    """

    def __init__(self, cache: KvCache, num_slots: int) -> None:
        """`num_slots`: blocks that the host's memory has room for; may be 0."""
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        parts = [
            part.view(torch.uint8).view(cache.num_blocks + 1, -1)
            for pages in cache.layers
            for part in (pages.k, pages.v, pages.k_scale, pages.v_scale)
            if part is not None
        ]
        word = next(w for w in _WORDS if all(p.shape[1] % w.itemsize == 0 for p in parts))
        self._parts = [part.view(word) for part in parts]  # each [blocks, words of a block]
        width = sum(part.shape[1] for part in self._parts)
        self._device = parts[0].device
        self._host = HostSlots(num_slots, width, word, pinned=self._device.type == "cuda")
        num_rows = min(cache.num_blocks, max(1, _STAGING_BYTES // (width * word.itemsize)))
        self._staging = torch.empty((num_rows, width), dtype=word, device=self._device)

    def run(self, decision: Decision) -> None:
        """Copies, then swap-outs, then swap-ins."""
        copies = decision.copies
        self._copy([c.source for c in copies], [c.target for c in copies])
        self._swap_out(
            [block for out in decision.swap_outs for block in out.blocks],
            [slot for out in decision.swap_outs for slot in out.slots],
        )
        self._swap_in(
            [slot for back in decision.swap_ins for slot in back.slots],
            [block for back in decision.swap_ins for block in back.blocks],
        )

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        assert not set(sources) & set(targets), "a copy's target is another's source"
        for start, end in self._pieces(len(sources)):
            self._scatter(self._gather(sources[start:end]), targets[start:end])

    def _swap_out(self, blocks: list[int], slots: list[int]) -> None:
        assert len(blocks) == len(slots)
        for start, end in self._pieces(len(blocks)):
            rows = self._gather(blocks[start:end])
            for place, memory in self._host.runs(slots[start:end]):
                memory.copy_(rows[place : place + len(memory)], non_blocking=True)

    def _swap_in(self, slots: list[int], blocks: list[int]) -> None:
        assert len(blocks) == len(slots)
        for start, end in self._pieces(len(blocks)):
            rows = self._staging[: end - start]
            for place, memory in self._host.runs(slots[start:end]):
                rows[place : place + len(memory)].copy_(memory, non_blocking=True)
            self._scatter(rows, blocks[start:end])

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """As much at a time as the buffer holds."""
        size = len(self._staging)
        for start in range(0, count, size):
            yield start, min(start + size, count)

    def _gather(self, blocks: SequenceOf[int]) -> Tensor:
        """[n, width], until the buffer is used again."""
        index = torch.tensor(blocks, device=self._device)
        rows = self._staging[: len(blocks)]
        for part, place in self._columns(rows):
            place.copy_(part.index_select(0, index))
        return rows

    def _scatter(self, rows: Tensor, blocks: SequenceOf[int]) -> None:
        index = torch.tensor(blocks, device=self._device)
        for part, place in self._columns(rows):
            part.index_copy_(0, index, place)

    def _columns(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for part in self._parts:
            yield part, rows[:, start : start + part.shape[1]]
            start += part.shape[1]
