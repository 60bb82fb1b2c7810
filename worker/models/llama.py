"""LlamaModel: Llama 2 and 3 and what is built alike: Mistral, SmolLM2, TinyLlama, Qwen2, Qwen3.

Qwen2 has biases on q, k and v, Qwen3 norms of q and k, Mistral and Qwen windows: the config says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.rms_norm import add_rms_norm, rms_norm
from legato.worker.models.attention import Attention
from legato.worker.models.forward_pass import ForwardPass
from legato.worker.models.gated_mlp import GatedMlp
from legato.worker.models.rotation import Rotation
from legato.worker.models.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache
    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class LlamaLayer:
    """x += attention(norm(x)), then x += mlp(norm(x)).

    Each sum is left to the norm behind it, in this layer or the next, which does both at once.
    """

    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    mlp: GatedMlp
    eps: float

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, index: int) -> LlamaLayer:
        """Layer `index` of the checkpoint."""
        prefix = f"model.layers.{index}."
        return cls(
            input_norm=reader.vector(prefix + "input_layernorm.weight"),
            attention=Attention.read(reader, config, index),
            post_attention_norm=reader.vector(prefix + "post_attention_layernorm.weight"),
            mlp=GatedMlp.read(reader, config, index),
            eps=config.norm_eps,
        )

    def __call__(self, run: ForwardPass, tables: Tensor) -> None:
        """`run.hidden` is yet to be added to the residual, before (but for layer 0) and after."""
        if self.attention.index == 0:
            rms_norm(run.residual, self.input_norm, self.eps, out=run.hidden)
        else:
            add_rms_norm(run.hidden, run.residual, self.input_norm, self.eps, out=run.hidden)
        self.attention(run, tables)
        add_rms_norm(run.hidden, run.residual, self.post_attention_norm, self.eps, out=run.hidden)
        self.mlp(run)


class LlamaModel:
    """See `worker.forward.Model`. Stateless but for its weights: all context is in the cache."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        assert config.rope is not None, "a Llama without RoPE"
        self.config = config
        self.recordable = reader.recordable
        self._dtype = reader.activation_dtype
        self._rotation = Rotation(config.rope, config.head_dim, reader.device)
        self._vocabulary = Vocabulary.read(reader, config)
        self._layers = tuple(
            LlamaLayer.read(reader, config, index) for index in range(config.num_layers)
        )
        self._final_norm = reader.vector("model.norm.weight")

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Writes K and V of all T tokens at their slots; returns logits [R, vocab_size] fp32."""
        run = ForwardPass.begin(self.config, batch, cache, self._dtype)
        self._vocabulary.embed(batch.token_ids, run.residual)
        tables = self._rotation.tables(batch)
        for layer in self._layers:
            layer(run, tables)
        return run.finish(self._head, add_hidden=True)

    def _head(self, rows: Tensor, logits: Tensor) -> Tensor:
        rms_norm(rows, self._final_norm, self.config.norm_eps, out=rows)
        return self._vocabulary.logits(rows, logits)
