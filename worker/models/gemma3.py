"""Gemma3Model: the language model of Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.rms_norm import rms_norm, rms_norm_add
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

NORM_PLUS = 1.0  # Gemma stores its norms' weights less one


@dataclass(frozen=True)
class Gemma3Layer:
    """x += norm(attention(norm(x))), then x += norm(mlp(norm(x)))."""

    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: GatedMlp
    post_mlp_norm: Tensor
    eps: float

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, index: int) -> Gemma3Layer:
        """Layer `index` of the checkpoint."""

        def norm(name: str) -> Tensor:
            return reader.vector(f"model.layers.{index}.{name}_layernorm.weight", plus=NORM_PLUS)

        return cls(
            input_norm=norm("input"),
            attention=Attention.read(reader, config, index, norm_plus=NORM_PLUS),
            post_attention_norm=norm("post_attention"),
            pre_mlp_norm=norm("pre_feedforward"),
            mlp=GatedMlp.read(reader, config, index),
            post_mlp_norm=norm("post_feedforward"),
            eps=config.norm_eps,
        )

    def __call__(self, run: ForwardPass, tables: Tensor) -> None:
        """Changes `run.residual`."""
        rms_norm(run.residual, self.input_norm, self.eps, out=run.hidden)
        self.attention(run, tables)
        rms_norm_add(run.hidden, run.residual, self.post_attention_norm, self.eps)
        rms_norm(run.residual, self.pre_mlp_norm, self.eps, out=run.hidden)
        self.mlp(run)
        rms_norm_add(run.hidden, run.residual, self.post_mlp_norm, self.eps)


class Gemma3Model:
    """See `worker.forward.Model`. Layers with a window have a RoPE of their own."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        assert config.rope is not None, "a Gemma without RoPE"
        self.config = config
        self.recordable = reader.recordable
        self._dtype = reader.activation_dtype
        self._rotation = Rotation(config.rope, config.head_dim, reader.device)
        self._local_rotation = Rotation(
            config.local_rope or config.rope, config.head_dim, reader.device
        )
        # Rounded to the weights' dtype, as Gemma was trained: 55.5 in bf16 for 55.4256.
        scale = torch.tensor(config.hidden_size**0.5, dtype=reader.dtype).item()
        self._vocabulary = Vocabulary.read(reader, config, scale=scale)
        self._layers = tuple(
            Gemma3Layer.read(reader, config, index) for index in range(config.num_layers)
        )
        self._final_norm = reader.vector("model.norm.weight", plus=NORM_PLUS)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Writes K and V of all T tokens at their slots; returns logits [R, vocab_size] fp32."""
        run = ForwardPass.begin(self.config, batch, cache, self._dtype)
        self._vocabulary.embed(batch.token_ids, run.residual)
        tables = self._rotation.tables(batch)
        local_tables = self._local_rotation.tables(batch)
        for layer in self._layers:
            layer(run, tables if layer.attention.window is None else local_tables)
        return run.finish(self._head, add_hidden=False)

    def _head(self, rows: Tensor, logits: Tensor) -> Tensor:
        rms_norm(rows, self._final_norm, self.config.norm_eps, out=rows)
        return self._vocabulary.logits(rows, logits)
