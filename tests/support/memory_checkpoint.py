"""A Checkpoint over a transformers model in memory, for tests of everything behind the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.worker.models.config import ModelConfig, RopeConfig
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM


def model_config(config: LlamaConfig) -> ModelConfig:
    """The ModelConfig of a transformers Llama."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    settings = {"theta": rope["rope_theta"], "kind": kind}
    if kind != "default":
        settings["factor"] = rope["factor"]
    if kind == "llama3":
        settings["low_freq_factor"] = rope["low_freq_factor"]
        settings["high_freq_factor"] = rope["high_freq_factor"]
        settings["original_context_length"] = rope["original_max_position_embeddings"]
    return ModelConfig(
        architecture="llama",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        rope=RopeConfig(**settings),
    )


class MemoryCheckpoint:
    """Hands out the model's tensors; `finish` fails where one was not asked for."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.config = model_config(model.config)
        self._tensors = dict(model.state_dict())
        if self.config.tie_word_embeddings:
            # A stale head, as some files hold: whoever reads it gives wrong logits.
            self._tensors["lm_head.weight"] = torch.zeros(1)
        self._unread = set(self._tensors)
        self.finished = False

    @property
    def native_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def fingerprint(self) -> str:
        return "memory"

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} is {tuple(tensor.shape)}, expected {shape}")
        self._unread.discard(name)
        return tensor.detach().to(dtype)

    def finish(self) -> None:
        unread = self._unread - ({"lm_head.weight"} if self.config.tie_word_embeddings else set())
        if unread:
            raise CheckpointError(f"tensors never read: {sorted(unread)}")
        self.finished = True
