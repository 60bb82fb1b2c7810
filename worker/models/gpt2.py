"""Gpt2Model: GPT-2, with learned positions, LayerNorm and a plain MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.gated import gelu
from legato.kernels.layer_norm import add_layer_norm, layer_norm
from legato.kernels.rows import take_rows
from legato.worker.models.attention import Attention
from legato.worker.models.forward_pass import ForwardPass
from legato.worker.models.projection import Projection
from legato.worker.models.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache
    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class Norm:
    """A LayerNorm's weight and bias."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, name: str) -> Norm:
        """The one called `name`."""
        weight, bias = (reader.vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        return cls(weight, bias, config.norm_eps)


@dataclass(frozen=True)
class Gpt2Layer:
    """x += attention(norm(x)), then x += down(gelu(up(norm(x)))).

    Each sum is left to the norm behind it, in this layer or the next, which does both at once.
    """

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    up: Projection
    down: Projection

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, index: int) -> Gpt2Layer:
        """Layer `index` of the checkpoint, whose matrices lie [in, out], with q, k and v in one."""
        prefix = f"transformer.h.{index}."

        def projection(name: str) -> Projection:
            return Projection.read(reader, prefix + name, transposed=True)

        return cls(
            input_norm=Norm.read(reader, config, prefix + "ln_1"),
            attention=Attention.of(
                config, index, projection("attn.c_attn"), projection("attn.c_proj")
            ),
            post_attention_norm=Norm.read(reader, config, prefix + "ln_2"),
            up=projection("mlp.c_fc"),
            down=projection("mlp.c_proj"),
        )

    def __call__(self, run: ForwardPass) -> None:
        """`run.hidden` is yet to be added to the residual, before (but for layer 0) and after."""
        hidden, norm = run.hidden, self.input_norm
        if self.attention.index == 0:
            layer_norm(run.residual, norm.weight, norm.bias, norm.eps, out=hidden)
        else:
            add_layer_norm(hidden, run.residual, norm.weight, norm.bias, norm.eps, out=hidden)
        self.attention(run, None)
        norm = self.post_attention_norm
        add_layer_norm(hidden, run.residual, norm.weight, norm.bias, norm.eps, out=hidden)
        for piece, inner in run.pieces():
            self.up(piece, inner)
            gelu(inner, out=inner)
            self.down(inner, piece)


class Gpt2Model:
    """See `worker.forward.Model`. Positions must be below `config.context_length`: admission sees
    to it, since there are no embeddings for others.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        self.config = config
        self.recordable = reader.recordable
        self._dtype = reader.activation_dtype
        self._vocabulary = Vocabulary.read(reader, config)
        self._positions = reader.embedding("transformer.wpe.weight")
        self._layers = tuple(
            Gpt2Layer.read(reader, config, index) for index in range(config.num_layers)
        )
        self._final_norm = Norm.read(reader, config, "transformer.ln_f")

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Writes K and V of all T tokens at their slots; returns logits [R, vocab_size] fp32."""
        run = ForwardPass.begin(self.config, batch, cache, self._dtype)
        self._vocabulary.embed(batch.token_ids, run.residual)
        take_rows(self._positions, batch.positions, run.residual, add=True)
        for layer in self._layers:
            layer(run)
        return run.finish(self._head, add_hidden=True)

    def _head(self, rows: Tensor, logits: Tensor) -> Tensor:
        norm = self._final_norm
        layer_norm(rows, norm.weight, norm.bias, norm.eps, out=rows)
        return self._vocabulary.logits(rows, logits)
