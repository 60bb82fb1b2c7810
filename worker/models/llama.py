"""LlamaModel: the Llama family (Llama 2 and 3, SmolLM2, TinyLlama, Mistral without windows)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.gated import silu_mul
from legato.kernels.kv_scatter import kv_scatter
from legato.kernels.linear import linear
from legato.kernels.paged_decode_attention import paged_decode_attention
from legato.kernels.paged_prefill_attention import paged_prefill_attention
from legato.kernels.rms_norm import add_rms_norm, rms_norm
from legato.kernels.rope import apply_rope, rotation_tables
from legato.kernels.rows import take_rows
from legato.worker.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import Weight
    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache
    from legato.worker.models.config import ModelConfig


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one decoder layer; matrices are [out, in], as `kernels.linear` packs them."""

    input_norm: Tensor
    qkv: Weight  # query heads, key heads, value heads
    qkv_bias: Tensor | None
    attention_out: Weight
    attention_out_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Weight  # gate, then up
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True)
class LlamaWeights:
    """Weights of the whole model."""

    embedding: Tensor  # [vocab_size, hidden_size], plain
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    head: Weight  # [vocab_size, hidden_size]; the embedding's values where they are tied


class LlamaModel:
    """See `worker.forward.Model`. Stateless but for its weights: all context is in the cache."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        self._device = weights.embedding.device
        self._scale = config.head_dim**-0.5
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim).to(
            self._device
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Writes K and V of all T tokens at their slots; returns logits [R, vocab_size] fp32."""
        weights, eps = self._weights, self.config.norm_eps
        num_tokens = batch.token_ids.shape[0]
        residual = weights.final_norm.new_empty(num_tokens, self.config.hidden_size)
        take_rows(weights.embedding, batch.token_ids, residual)
        tables = self._inverse_frequencies.new_empty(num_tokens, 2, self.config.head_dim // 2)
        rotation_tables(batch.positions, self._inverse_frequencies, tables)
        hidden = rms_norm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            if index:
                hidden = add_rms_norm(hidden, residual, layer.input_norm, eps)
            attended = self._attend(layer, hidden, tables, batch, cache, index)
            hidden = linear(attended, layer.attention_out, layer.attention_out_bias)
            hidden = add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            gated = silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))
            hidden = linear(gated, layer.down, layer.down_bias)
        if batch.logit_rows.shape[0] == 0:  # a chunk in the middle of a prompt
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        last = residual[batch.logit_rows] + hidden[batch.logit_rows]
        return linear(rms_norm(last, weights.final_norm, eps), weights.head).float()

    def _attend(
        self,
        layer: LlamaLayer,
        hidden: Tensor,
        tables: Tensor,
        batch: ForwardBatch,
        cache: KvCache,
        index: int,
    ) -> Tensor:
        """[T, hidden_size] to [T, num_heads * head_dim]; the new rows go into the cache first."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = linear(hidden, layer.qkv, layer.qkv_bias)
        heads = heads.view(hidden.shape[0], -1, self.config.head_dim)
        rotated = num_heads + num_kv_heads
        apply_rope(heads[:, :rotated], tables)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:rotated], heads[:, rotated:]
        pages, plan = cache.layers[index], batch.plan
        kv_scatter(k, v, pages, batch.slots)
        attention = paged_decode_attention if plan.one_query_each else paged_prefill_attention
        return attention(q, pages, plan, self._scale).flatten(1)
