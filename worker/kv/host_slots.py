"""HostSlots: host memory for swapped-out KV, a slot for each block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

_SEGMENT_BYTES = 64 << 20  # a power of two: torch rounds pinned memory up to one


class HostSlots:
    """Rows of one block each, K, V and scales of all layers one after the other.

    The memory is taken in segments, each when a slot of it is first written: what was never
    swapped out costs nothing. For a CUDA device it is pinned, so that copies need not wait.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        """`width`: elements of a row."""
        self._num_slots = num_slots
        self._width = width
        self._dtype = dtype
        self._pinned = pinned
        self._slots_a_segment = max(1, _SEGMENT_BYTES // (width * dtype.itemsize))
        self._segments: dict[int, Tensor] = {}

    def runs(self, slots: SequenceOf[int]) -> Iterator[tuple[int, Tensor]]:
        """`slots` as pieces that lie together: (place of the first in `slots`, [n, width])."""
        start = 0
        while start < len(slots):
            assert 0 <= slots[start] < self._num_slots, "beyond the host's memory"
            segment, offset = divmod(slots[start], self._slots_a_segment)
            end = start + 1
            while (
                end < len(slots)
                and slots[end] == slots[end - 1] + 1
                and slots[end] % self._slots_a_segment
            ):
                end += 1
            yield start, self._segment(segment)[offset : offset + end - start]
            start = end

    def _segment(self, number: int) -> Tensor:
        segment = self._segments.get(number)
        if segment is None:
            first = number * self._slots_a_segment
            num_rows = min(self._slots_a_segment, self._num_slots - first)
            segment = torch.empty(
                (num_rows, self._width), dtype=self._dtype, pin_memory=self._pinned
            )
            self._segments[number] = segment
        return segment
