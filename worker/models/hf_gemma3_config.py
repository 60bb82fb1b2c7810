"""hf_gemma3_config: config.json of Gemma 3, text only or the text part of a multimodal one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.models.config import ModelConfig
from legato.worker.models.config_fields import require_causal
from legato.worker.models.hf_layer_types import KINDS, read_layer_types, read_num_layers, windows
from legato.worker.models.hf_llama_config import activation, read_num_kv_heads
from legato.worker.models.hf_rope import read_rope_object, rope_object
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from legato.worker.models.config import RopeConfig
    from legato.worker.models.config_fields import ConfigFields

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def gemma3_config(fields: ConfigFields) -> ModelConfig:
    """Gemma3ForCausalLM; the defaults are transformers', and published files rely on them."""
    return _text_config(fields, tied=fields.boolean("tie_word_embeddings", default=True))


def gemma3_multimodal_config(fields: ConfigFields) -> ModelConfig:
    """Gemma3ForConditionalGeneration, of which the language model alone is served."""
    settings = fields.get("text_config")
    if not isinstance(settings, dict):
        raise fields.error("text_config", f"must be an object, got {quoted(settings)}")
    text = fields.inside("text_config", settings)
    require_causal(text)
    if text.text("model_type", "gemma3_text") != "gemma3_text":
        raise text.error(
            "model_type", f"is {quoted(text.get('model_type'))}; supported is gemma3_text"
        )
    return _text_config(text, tied=fields.boolean("tie_word_embeddings", default=True))


def _text_config(fields: ConfigFields, *, tied: bool) -> ModelConfig:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(name) is not None:
            raise fields.error(name, f"is {quoted(fields.get(name))}; softcapping is not supported")
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "is true; only causal models are served")
    num_heads = fields.integer("num_attention_heads", 8)
    context_length = fields.integer("max_position_embeddings", 131072)
    bias = fields.boolean("attention_bias", default=False)
    rope, local_rope = _ropes(fields, context_length)
    return ModelConfig(
        architecture="gemma3",
        num_layers=read_num_layers(fields),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read_num_kv_heads(fields, num_heads, 4),
        head_dim=fields.integer("head_dim", 256),
        vocab_size=fields.integer("vocab_size", 262_208),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=tied,
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_windows(fields),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """By layer_types, else full attention in every sliding_window_pattern-th layer."""
    num_layers = read_num_layers(fields)
    kinds = read_layer_types(fields, num_layers)
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern", 6)
        if pattern < 1:
            raise fields.error("sliding_window_pattern", f"must be at least 1, got {pattern}")
        kinds = [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(num_layers)
        ]
    if "sliding_attention" not in kinds:
        return ()
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        raise fields.error("sliding_window", "is null, but there are layers with a window")
    window = fields.integer("sliding_window", 4096)
    if window < 1:
        raise fields.error("sliding_window", f"must be at least 1, got {window}")
    return windows(kinds, window)


def _ropes(fields: ConfigFields, context_length: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers with full attention, and of those with a window.

    New files have an object for each in rope_parameters; old ones rope_theta and rope_scaling for
    the first, rope_local_base_freq for the second.
    """
    name = "rope_parameters"
    both = rope_object(fields, name)
    unknown = both.keys() - set(KINDS)
    if unknown:
        raise fields.error(
            name, f"has {quoted(min(unknown))}; Gemma 3 has {' and '.join(KINDS)} there"
        )
    full, sliding = (rope_object(fields.inside(name, both), kind) for kind in KINDS)
    scaling = rope_object(fields, "rope_scaling")
    if scaling and "rope_type" not in scaling:
        raise fields.error("rope_scaling", "has no rope_type")
    return (
        read_rope_object(
            fields,
            "rope_scaling" if scaling else f"{name}.{KINDS[0]}",
            full | scaling,
            context_length,
            fields.number("rope_theta", GLOBAL_THETA),
        ),
        read_rope_object(
            fields,
            f"{name}.{KINDS[1]}",
            sliding,
            context_length,
            fields.number("rope_local_base_freq", LOCAL_THETA),
        ),
    )
