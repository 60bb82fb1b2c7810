"""Vocabulary: token embeddings on one end of a model, the head's logits on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.linear import linear
from legato.kernels.rows import take_rows
from legato.worker.weights.tensor_table import HEAD, embedding_name

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import Weight
    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.weight_reader import WeightReader

_HEAD_LAYER = HEAD.removesuffix(".weight")


@dataclass(frozen=True)
class Vocabulary:
    """Both have shape [vocab_size, hidden_size], and are the same where they are tied."""

    embedding: Weight
    head: Weight
    scale: float  # of the embeddings

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, *, scale: float = 1.0) -> Vocabulary:
        """The embedding, and the head where the model has one of its own."""
        name = embedding_name(config)
        if not config.tie_word_embeddings:
            return cls(reader.embedding(name), reader.matrix(_HEAD_LAYER), scale)
        both = reader.matrix(name.removesuffix(".weight"))
        return cls(both, both, scale)

    def embed(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids [T] to `out` [T, hidden_size]."""
        take_rows(self.embedding, token_ids, out, scale=self.scale)

    def logits(self, rows: Tensor, out: Tensor) -> Tensor:
        """Of rows [R, hidden_size], which have had their norm, to `out` [R, vocab_size] fp32."""
        return linear(rows, self.head, out=out)
