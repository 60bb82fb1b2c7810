"""tensor_table: names and shapes of the tensors that a model's config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import join_names, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from legato.worker.models.config import ModelConfig

HEAD = "lm_head.weight"


def model_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor, under the names that Hugging Face saves."""
    yield from _gpt2_tensors(config) if config.architecture == "gpt2" else _llama_tensors(config)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)


def embedding_name(config: ModelConfig) -> str:
    """The token embedding, which is also the head where they are tied."""
    gpt2 = config.architecture == "gpt2"
    return "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"


def _llama_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All families but GPT-2; Gemma 3 has two norms more."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": ((q_size, hidden), config.attention_bias),
        "self_attn.k_proj": ((kv_size, hidden), config.attention_bias),
        "self_attn.v_proj": ((kv_size, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, q_size), config.attention_out_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    if config.architecture == "gemma3":
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}

    yield embedding_name(config), (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (shape, has_bias) in linears.items():
            yield f"{prefix}.{name}.weight", shape
            if has_bias:
                yield f"{prefix}.{name}.bias", shape[:1]
        for name, size in norms.items():
            yield f"{prefix}.{name}.weight", (size,)
    yield "model.norm.weight", (hidden,)


def _gpt2_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Its matrices are stored [in, out]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    yield embedding_name(config), (config.vocab_size, hidden)
    yield "transformer.wpe.weight", (config.num_learned_positions, hidden)
    for layer in range(config.num_layers):
        prefix = f"transformer.h.{layer}"
        for name, shape in linears.items():
            yield f"{prefix}.{name}.weight", shape
            yield f"{prefix}.{name}.bias", shape[1:]
        for name in ("ln_1", "ln_2"):
            yield f"{prefix}.{name}.weight", (hidden,)
            yield f"{prefix}.{name}.bias", (hidden,)
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may lie in the files unread.

    A tied model may carry a copy of its head; old ones saved RoPE frequencies or causal masks,
    which follow from the config.
    """
    if name == HEAD:
        return config.tie_word_embeddings
    if config.architecture == "gpt2":
        return name.endswith((".attn.bias", ".attn.masked_bias"))
    return name.endswith(".rotary_emb.inv_freq")


def check_shapes(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, str], where: str
) -> None:
    """Compares what the files hold with what the config asks for, before anything is read.

    `shapes` and `files` are keyed by tensor name; `where` names the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not one of the model's.
    """
    wanted = set()
    # Stops at the first fault, so a config that claims a billion layers costs nothing.
    for name, shape in model_tensors(config):
        if name not in shapes:
            raise CheckpointError(
                f"{where}: tensor {name} of shape {list(shape)} is missing from the checkpoint"
            )
        if shapes[name] != shape:
            raise shape_error(files[name], name, shapes[name], shape)
        wanted.add(name)
    extra = sorted(n for n in shapes if n not in wanted and not is_harmless(n, config))
    if extra:
        raise CheckpointError(
            f"{files[extra[0]]}: the config has no place for tensor {join_names(extra)}"
        )


def shape_error(
    file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> CheckpointError:
    """The error for a tensor of another shape than the model needs."""
    return CheckpointError(
        f"{file}: tensor {name} has shape {quoted(list(found))}, the model needs {list(wanted)}"
    )
