"""hf_gpt2_config: config.json of GPT-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.models.config import ModelConfig
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from legato.worker.models.config_fields import ConfigFields

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


def gpt2_config(fields: ConfigFields) -> ModelConfig:
    """GPT2LMHeadModel. Its sizes have names of their own beside the usual ones.

    reorder_and_upcast_attn asks for scores in fp32, which ours always are: nothing to do.
    """
    for name, plain in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.boolean(name, default=plain) is not plain:
            raise fields.error(name, f"is {str(not plain).lower()}, which is not supported")
    activation = fields.text("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise fields.error(
            "activation_function",
            f"is {quoted(activation)}; supported are {', '.join(ACTIVATIONS)}",
        )
    hidden_size = _size(fields, "n_embd", "hidden_size")
    num_heads = _size(fields, "n_head", "num_attention_heads")
    if num_heads < 1 or hidden_size % num_heads:
        raise fields.error("n_embd", f"{hidden_size} must be a multiple of n_head {num_heads}")
    num_positions = _size(fields, "n_positions", "max_position_embeddings")
    return ModelConfig(
        architecture="gpt2",
        num_layers=_size(fields, "n_layer", "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=fields.integer("vocab_size"),
        context_length=num_positions,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=True),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        rope=None,
        num_learned_positions=num_positions,
    )


def _size(fields: ConfigFields, name: str, usual_name: str) -> int:
    """The usual name wins over GPT-2's own, as in transformers."""
    return fields.integer(name if fields.get(usual_name) is None else usual_name)
