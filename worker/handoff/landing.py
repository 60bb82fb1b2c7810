"""LandingRecord: which rows of a transfer have landed."""

from __future__ import annotations


class LandingRecord:
    """One byte a row and layer; chunks may come in any order, overlap, or come twice."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._rows = [bytearray(num_tokens) for _ in range(num_layers)]
        self._missing = num_layers * num_tokens

    @property
    def num_landed(self) -> int:
        """Rows landed, over all layers, each counted once."""
        return len(self._rows) * self._num_tokens - self._missing

    def has(self, layer: int, token_start: int, num_tokens: int) -> bool:
        """Whether the whole range is there."""
        return not self._rows[layer].count(0, token_start, token_start + num_tokens)

    def add(self, layer: int, token_start: int, num_tokens: int) -> None:
        """Notes a range."""
        end = token_start + num_tokens
        self._missing -= self._rows[layer].count(0, token_start, end)
        self._rows[layer][token_start:end] = b"\x01" * num_tokens

    def first_missing(self) -> tuple[int, int] | None:
        """(layer, token) of the first row that is not there, or None."""
        for layer, rows in enumerate(self._rows):
            token = rows.find(0)
            if token >= 0:
                return layer, token
        return None
