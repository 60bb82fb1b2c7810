"""ModelCost: the bytes and operations that a model's steps cannot do without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.models.config import ModelConfig

# Gate, up and down; GPT-2 has no gate.
_MLP_MATRICES = {"gpt2": 2}


@dataclass(frozen=True)
class ModelCost:
    """Norms, activations and the embedding's look-up are left out: they are too small to matter."""

    weight_bytes: int  # that every step reads, as they lie in memory: the embedding is not read
    kv_bytes_per_token: int  # of all layers, as they lie in the cache
    layer_weights: int  # elements of all layers' matrices
    head_weights: int
    attention_width: int  # query heads * head_dim, summed over the layers
    layer_windows: tuple[int | None, ...] = (None,)  # of each layer; None: it sees everything

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> ModelCost:
        """Of a model of this shape."""
        return cls(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            layer_weights=config.num_layers * layer_weights(config),
            head_weights=config.hidden_size * config.vocab_size,
            attention_width=config.num_layers * config.num_heads * config.head_dim,
            layer_windows=tuple(config.window(layer) for layer in range(config.num_layers)),
        )

    def decode_bytes(self, context_lens: Sequence[int]) -> int:
        """Read by one decode step of sequences with so many rows of KV each.

        A layer with a window reads the rows inside it.
        """
        rows = sum(
            length if window is None else min(length, window)
            for window in self.layer_windows
            for length in context_lens
        )
        return self.weight_bytes + rows * self.kv_bytes_per_token // len(self.layer_windows)

    def decode_ops(self, num_sequences: int, rows: int) -> int:
        """Multiplications and additions of one decode step, with `rows` of KV in all."""
        weights = 2 * (self.layer_weights + self.head_weights) * num_sequences
        return weights + 4 * self.attention_width * rows

    def prefill_ops(self, start: int, end: int, num_logit_rows: int = 1) -> int:
        """Multiplications and additions for the tokens `start : end` of one sequence.

        A token attends to itself and what its layer sees before it: two products each.
        """
        attended = sum(_attended(start, end, window) for window in self.layer_windows)
        return (
            2 * self.layer_weights * (end - start)
            + 2 * self.head_weights * num_logit_rows
            + 4 * self.attention_width * attended // len(self.layer_windows)
        )


def _attended(start: int, end: int, window: int | None) -> int:
    """Keys seen by the tokens at positions `start : end`, summed."""
    full = end if window is None else min(max(window, start), end)  # from here on: `window` each
    return (start + 1 + full) * (full - start) // 2 + (window or 0) * (end - full)


def layer_weights(config: ModelConfig) -> int:
    """Elements of one layer's matrices."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = _MLP_MATRICES.get(config.architecture, 3) * config.intermediate_size
    return config.hidden_size * (heads + mlp)
