"""The tensors of a Llama: names and shapes that its config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from legato.worker.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MAX_NAMES_IN_MESSAGE = 5


def llama_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor, under Hugging Face's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden)}
    attention |= {"v_proj": (kv_size, hidden), "o_proj": (hidden, q_size)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for part, linears, has_bias in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", mlp, config.mlp_bias),
        ):
            for linear, shape in linears.items():
                yield f"{prefix}.{part}.{linear}.weight", shape
                if has_bias:
                    yield f"{prefix}.{part}.{linear}.bias", shape[:1]
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may lie in the files unread.

    A tied model may carry a copy of its head; old ones saved the RoPE frequencies, which follow
    from the config.
    """
    if name == HEAD:
        return config.tie_word_embeddings
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
    for name, shape in llama_tensors(config):
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
        f"{file}: tensor {name} has shape {list(found)}, the model needs {list(wanted)}"
    )


def join_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    text = ", ".join(ordered[:MAX_NAMES_IN_MESSAGE])
    more = len(ordered) - MAX_NAMES_IN_MESSAGE
    return f"{text} and {more} more" if more > 0 else text
