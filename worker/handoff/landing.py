"""LandingRecord: which rows of a transfer have landed."""

from __future__ import annotations


class LandingRecord:
    """One byte a row and layer; chunks may come in any order, overlap, or come twice.

    The first `num_reused` tokens are no part of the transfer.
    """

    def __init__(self, num_layers: int, num_reused: int, num_tokens: int) -> None:
        self._first = num_reused
        self._num_rows = num_tokens - num_reused
        self._rows = [bytearray(self._num_rows) for _ in range(num_layers)]
        self._missing = num_layers * self._num_rows

    @property
    def num_landed(self) -> int:
        """Rows landed, over all layers, each counted once."""
        return len(self._rows) * self._num_rows - self._missing

    def has(self, layer: int, token_start: int, num_tokens: int) -> bool:
        """Whether the whole range is there."""
        start = token_start - self._first
        return not self._rows[layer].count(0, start, start + num_tokens)

    def add(self, layer: int, token_start: int, num_tokens: int) -> None:
        """Notes a range."""
        start = token_start - self._first
        end = start + num_tokens
        self._missing -= self._rows[layer].count(0, start, end)
        self._rows[layer][start:end] = b"\x01" * num_tokens

    def first_missing(self) -> tuple[int, int] | None:
        """(layer, token) of the first row that is not there, or None."""
        for layer, rows in enumerate(self._rows):
            row = rows.find(0)
            if row >= 0:
                return layer, self._first + row
        return None
