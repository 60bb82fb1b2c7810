"""build_model: a checkpoint's tensors, fused and packed, as a model on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.linear import pack_weight
from legato.worker.models.llama import LlamaLayer, LlamaModel, LlamaWeights
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from legato.kernels.weight import Weight
    from legato.worker.forward import Model
    from legato.worker.weights.checkpoint import Checkpoint

SUPPORTED_ARCHITECTURES = ("llama",)


def build_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Reads every tensor of the checkpoint, one at a time, and builds its model.

    Args:
        checkpoint: is finished afterwards.
        device: where the weights go.
        dtype: of all weights.
        on_progress: told (tensors read, tensors in all) after each one.

    Raises:
        CheckpointError: the architecture is not served, or a tensor is missing or wrong.
    """
    architecture = checkpoint.config.architecture
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    weights = _LlamaReader(checkpoint, device, dtype, on_progress).read()
    checkpoint.finish()
    return LlamaModel(checkpoint.config, weights)


class _LlamaReader:
    """Reads Llama's tensors in file order and counts them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._device = device
        self._dtype = dtype
        self._on_progress = on_progress
        self._num_read = 0
        per_layer = 9 + 4 * self._config.attention_bias + 3 * self._config.mlp_bias
        self._num_tensors = (
            self._config.num_layers * per_layer + 2 + (not self._config.tie_word_embeddings)
        )

    def read(self) -> LlamaWeights:
        """All of them."""
        config = self._config
        embedding_shape = (config.vocab_size, config.hidden_size)
        embedding = self._plain("model.embed_tokens.weight", embedding_shape)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        final_norm = self._plain("model.norm.weight", (config.hidden_size,))
        head = (
            embedding
            if config.tie_word_embeddings
            else self._plain("lm_head.weight", embedding_shape)
        )
        return LlamaWeights(embedding, layers, final_norm, pack_weight(head))

    def _layer(self, index: int) -> LlamaLayer:
        config, prefix = self._config, f"model.layers.{index}."
        query, key_value = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        input_norm = self._plain(prefix + "input_layernorm.weight", (config.hidden_size,))
        qkv, qkv_bias = self._matrix(
            [
                (attention + "q_proj", query),
                (attention + "k_proj", key_value),
                (attention + "v_proj", key_value),
            ],
            config.hidden_size,
            config.attention_bias,
        )
        attention_out, attention_out_bias = self._matrix(
            [(attention + "o_proj", config.hidden_size)], query, config.attention_bias
        )
        post_attention_norm = self._plain(
            prefix + "post_attention_layernorm.weight", (config.hidden_size,)
        )
        gate_up, gate_up_bias = self._matrix(
            [
                (mlp + "gate_proj", config.intermediate_size),
                (mlp + "up_proj", config.intermediate_size),
            ],
            config.hidden_size,
            config.mlp_bias,
        )
        down, down_bias = self._matrix(
            [(mlp + "down_proj", config.hidden_size)], config.intermediate_size, config.mlp_bias
        )
        return LlamaLayer(
            input_norm=input_norm,
            qkv=qkv,
            qkv_bias=qkv_bias,
            attention_out=attention_out,
            attention_out_bias=attention_out_bias,
            post_attention_norm=post_attention_norm,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
        )

    def _matrix(
        self, parts: list[tuple[str, int]], width: int, has_bias: bool
    ) -> tuple[Weight, Tensor | None]:
        """Projections of the same input as one packed matrix [sum of rows, width], and its bias."""
        rows = sum(size for _, size in parts)
        weight = torch.empty(rows, width, dtype=self._dtype, device=self._device)
        bias = torch.empty(rows, dtype=self._dtype, device=self._device) if has_bias else None
        start = 0
        for name, size in parts:
            weight[start : start + size] = self._read(name + ".weight", (size, width))
            if bias is not None:
                bias[start : start + size] = self._read(name + ".bias", (size,))
            start += size
        return pack_weight(weight), bias

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name, shape).to(self._device)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint.tensor(name, shape, self._dtype)
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(self._num_read, self._num_tensors)
        return tensor
