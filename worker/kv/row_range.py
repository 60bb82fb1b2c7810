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
