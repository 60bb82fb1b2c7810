"""RowRange: a rectangle of a sequence's KV: layers, tokens and KV heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowRange:
    """Of K and V both; all counts are at least 1."""

    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    head_start: int
    num_heads: int

    @property
    def layer_end(self) -> int:
        """Behind the last."""
        return self.layer_start + self.num_layers

    @property
    def token_end(self) -> int:
        """Behind the last."""
        return self.token_start + self.num_tokens

    @property
    def head_end(self) -> int:
        """Behind the last."""
        return self.head_start + self.num_heads

    def overlaps(self, other: RowRange) -> bool:
        """Some row of some head is in both."""
        return all(
            start < other_end and other_start < end
            for start, end, other_start, other_end in (
                (self.layer_start, self.layer_end, other.layer_start, other.layer_end),
                (self.token_start, self.token_end, other.token_start, other.token_end),
                (self.head_start, self.head_end, other.head_start, other.head_end),
            )
        )
