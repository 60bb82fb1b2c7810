"""LandingRecord: which rows of a ticket's KV have landed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.worker.kv.row_range import RowRange


class _Spans:
    """A set of whole numbers, as few spans."""

    def __init__(self, edges: list[int] | None = None) -> None:
        self._edges = edges or []  # first, behind the last, first, …: ascending

    def add(self, start: int, end: int) -> None:
        """All of [start, end)."""
        left = bisect_left(self._edges, start)
        right = bisect_right(self._edges, end)
        # An odd place is inside a span, which then begins or ends there instead.
        new_start = [start] if left % 2 == 0 else []
        new_end = [end] if right % 2 == 0 else []
        self._edges[left:right] = new_start + new_end

    def remove(self, start: int, end: int) -> None:
        """All of [start, end)."""
        left = bisect_left(self._edges, start)
        right = bisect_right(self._edges, end)
        # An odd place is inside a span, which then ends or begins there instead.
        new_start = [start] if left % 2 else []
        new_end = [end] if right % 2 else []
        self._edges[left:right] = new_start + new_end

    def first_missing(self, start: int) -> int:
        """The least number from `start` on that is not in it."""
        place = bisect_right(self._edges, start)
        return self._edges[place] if place % 2 else start

    def copy(self) -> _Spans:
        return _Spans(list(self._edges))


@dataclass(eq=False)
class Write:
    """Rows that are being written."""

    rows: RowRange
    # Begun behind it over some of its rows: what is there in the end is theirs.
    later: list[RowRange] = field(default_factory=list)


class LandingRecord:
    """Rows may come in any order and any rectangles, overlap, or come twice.

    The first `num_reused` tokens were there before. Heads that always come together are kept
    together, so a record is as large as the number of gaps in it, not as the number of rows.
    """

    def __init__(self, num_layers: int, num_heads: int, num_reused: int, num_tokens: int) -> None:
        self.num_layers = num_layers
        self.num_reused = num_reused
        self.num_tokens = num_tokens
        # By where a group of heads begins, and the next one's begin is its end; one set a layer.
        self._groups = {0: [_Spans() for _ in range(num_layers)]}
        self._num_heads = num_heads
        self._writes: list[Write] = []  # in the order in which the pages get them

    @property
    def num_rows(self) -> int:
        """Rows to land, over all layers."""
        return self.num_layers * (self.num_tokens - self.num_reused)

    def begin(self, rows: RowRange) -> Write:
        """A rectangle, which lies within the record's bounds, is being written: it is not there,
        whether or not it was. To be followed by `end`.
        """
        self._remove(rows)
        for write in self._writes:
            if write.rows.overlaps(rows):
                write.later.append(rows)
        self._writes.append(Write(rows))
        return self._writes[-1]

    def end(self, write: Write, *, has_landed: bool) -> None:
        """Its rows are there now, or may be anything; those of a later write are never there by
        this one.
        """
        self._writes.remove(write)
        if not has_landed:
            return
        for spans in self._spans(write.rows):
            spans.add(write.rows.token_start, write.rows.token_end)
        for rows in write.later:
            self._remove(rows)

    def landed_tokens(self) -> list[int]:
        """For each layer, how many first tokens are there with all heads."""
        return [
            min(layers[layer].first_missing(self.num_reused) for layers in self._groups.values())
            for layer in range(self.num_layers)
        ]

    def first_missing(self) -> tuple[int, int] | None:
        """(layer, token) of the first row that is not there, or None."""
        for layer, token in enumerate(self.landed_tokens()):
            if token < self.num_tokens:
                return layer, token
        return None

    def _remove(self, rows: RowRange) -> None:
        for spans in self._spans(rows):
            spans.remove(rows.token_start, rows.token_end)

    def _spans(self, rows: RowRange) -> Iterator[_Spans]:
        self._split(rows.head_start)
        self._split(rows.head_end)
        for head, layers in self._groups.items():
            if rows.head_start <= head < rows.head_end:
                yield from layers[rows.layer_start : rows.layer_end]

    def _split(self, head: int) -> None:
        """From now on a group begins with that head."""
        if head in self._groups or head == self._num_heads:
            return
        before = max(start for start in self._groups if start < head)
        self._groups[head] = [spans.copy() for spans in self._groups[before]]
