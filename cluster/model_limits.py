"""ModelLimits: what a request may ask of the model and the pools that serve it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelLimits:
    """What the ready workers can hold; the capacities are those of the largest worker."""

    context_length: int
    vocab_size: int
    prefill_kv_tokens: int
    decode_kv_tokens: int
    decode_block_size: int

    def decode_rows(self, num_prompt: int, num_answers: int) -> int:
        """Rows of KV that each answer may have at its end; they share the prompt's full blocks."""
        blocks, size = self.decode_kv_tokens // self.decode_block_size, self.decode_block_size
        shared = num_prompt // size if num_answers > 1 else 0
        return (shared + max(0, blocks - shared) // num_answers) * size
