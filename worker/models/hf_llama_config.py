"""hf_llama_config: config.json of Llama and of what is built like it: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.models.config import ModelConfig
from legato.worker.models.hf_layer_types import read_layer_types, read_num_layers, windows
from legato.worker.models.hf_rope import read_hf_rope
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from legato.worker.models.config import Activation
    from legato.worker.models.config_fields import ConfigFields

GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# The defaults below are what transformers takes where config.json is silent.


def llama_config(fields: ConfigFields) -> ModelConfig:
    """LlamaForCausalLM: Llama 2 and 3, SmolLM2, TinyLlama, …"""
    bias = fields.boolean("attention_bias", default=False)
    return _decoder_config(
        fields,
        "llama",
        context_length=2048,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def mistral_config(fields: ConfigFields) -> ModelConfig:
    """MistralForCausalLM: a Llama with a window on every layer, and without biases."""
    if fields.get("layer_types") is not None:
        raise fields.error("layer_types", "is not supported for Mistral")
    window = _default_window(fields)
    num_layers = read_num_layers(fields)
    return _decoder_config(
        fields,
        "llama",
        context_length=131072,
        num_kv_heads=8,
        layer_windows=windows(["sliding_attention"] * num_layers, window) if window else (),
    )


def qwen2_config(fields: ConfigFields) -> ModelConfig:
    """Qwen2ForCausalLM, also Qwen2.5: biases on q, k and v, and on nothing else."""
    return _decoder_config(
        fields,
        "qwen2",
        context_length=32768,
        num_kv_heads=32,
        attention_bias=True,
        layer_windows=_qwen_windows(fields),
    )


def qwen3_config(fields: ConfigFields) -> ModelConfig:
    """Qwen3ForCausalLM: norms of q and k, and a head_dim of its own."""
    bias = fields.boolean("attention_bias", default=False)
    return _decoder_config(
        fields,
        "qwen3",
        context_length=32768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        layer_windows=_qwen_windows(fields),
    )


def activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """The gated MLP's activation, in our name for it."""
    found = fields.text(name, default)
    if found not in GATED_ACTIVATIONS:
        raise fields.error(
            name, f"is {quoted(found)}; supported are {', '.join(GATED_ACTIVATIONS)}"
        )
    return GATED_ACTIVATIONS[found]


def read_num_kv_heads(fields: ConfigFields, num_heads: int, default: int | None) -> int:
    """`default` where the field is absent; a null means "as many as query heads"."""
    if fields.has("num_key_value_heads") or default is None:
        return fields.integer("num_key_value_heads", num_heads)
    return default


def _decoder_config(
    fields: ConfigFields,
    architecture: str,
    *,
    context_length: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    attention_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    layer_windows: tuple[int | None, ...] = (),
) -> ModelConfig:
    """What the four have in common; None as a default: derived from the other sizes."""
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    context_length = fields.integer("max_position_embeddings", context_length)
    return ModelConfig(
        architecture=architecture,
        num_layers=read_num_layers(fields),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read_num_kv_heads(fields, num_heads, num_kv_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads, head_dim),
        vocab_size=fields.integer("vocab_size"),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=attention_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation=activation(fields, "hidden_act", "silu"),
        rope=read_hf_rope(fields, context_length),
        layer_windows=layer_windows,
    )


def _qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """By layer_types, else for the layers from max_window_layers on."""
    used = fields.boolean("use_sliding_window", default=False)
    window = _default_window(fields) if used else None
    num_layers = read_num_layers(fields)
    kinds = read_layer_types(fields, num_layers)
    if kinds is None:
        first = fields.integer("max_window_layers", 28)
        if window is None:
            return ()
        kinds = [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    if window is None and "sliding_attention" in kinds:
        raise fields.error(
            "layer_types", "has sliding_attention, but use_sliding_window or sliding_window is off"
        )
    return windows(kinds, window)


def _default_window(fields: ConfigFields) -> int | None:
    """A null means none."""
    if not fields.has("sliding_window"):
        return 4096
    if fields.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    if window < 1:
        raise fields.error("sliding_window", f"must be at least 1, got {window}")
    return window


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, default: int | None) -> int:
    if fields.get("head_dim") is not None or default is not None:
        return fields.integer("head_dim", default)
    if num_heads < 1 or hidden_size % num_heads:
        raise fields.error(
            "hidden_size",
            f"{hidden_size} must be a multiple of num_attention_heads {num_heads} "
            "where head_dim is not given",
        )
    return hidden_size // num_heads
