"""gguf_config: the metadata of a GGUF file, of each architecture served, as a ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.models.config import ModelConfig, RopeConfig
from legato.worker.models.config_fields import ConfigFields
from legato.worker.models.gguf_rope import read_gguf_rope
from legato.worker.models.gguf_sizes import GgufSizes, read_gguf_sizes
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

# Settings that change the computation and that this engine does not know. Absent or 0 means off;
# anything else is refused.
_UNSUPPORTED = (
    "expert_count",
    "expert_used_count",
    "attention.scale",
    "attention.output_scale",
    "attention.temperature_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.shared_kv_layers",
    "use_parallel_residual",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
# The file does not tell how Gemma 3's scores are scaled: as in llama.cpp, the number of layers
# does. It is 1 / sqrt(head_dim) but for the 27B model, which has these layers.
GEMMA3_27B_LAYERS = 62
GEMMA3_WINDOW_PATTERN = 6  # every sixth layer sees all; no file has needed the key so far
GEMMA3_LOCAL_THETA = 10000.0


@dataclass(frozen=True)
class _File:
    """What a config is made from; see `gguf_model_config`."""

    architecture: str
    fields: ConfigFields  # those of the architecture
    tensor_names: Collection[str]
    vocab_size: int
    rope_freqs: Sequence[float] | None

    @property
    def has_no_head(self) -> bool:
        """Whether the embedding is the head too."""
        return "output.weight" not in self.tensor_names


def gguf_model_config(
    metadata: Mapping[str, object],
    *,
    tensor_names: Collection[str],
    vocab_size: int,
    rope_freqs: Sequence[float] | None,
    where: str,
) -> ModelConfig:
    """The model that the metadata and the names of the tensors describe.

    `vocab_size` is the number of rows of the embedding; `rope_freqs` the contents of
    rope_freqs.weight, where there is one; `where` names the file in errors.

    Raises:
        CheckpointError: something is missing, malformed or not served by this engine.
    """
    architecture = ConfigFields(metadata, where, "general.").text("architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{where}: general.architecture is {quoted(architecture)}; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    parts = ConfigFields(metadata, where, "split.")
    if parts.integer("count", 1) > 1:
        raise parts.error(
            "count", f"is {parts.integer('count')}: one part of a model; join the parts first"
        )
    fields = ConfigFields(metadata, where, f"{architecture}.")
    for name in _UNSUPPORTED:
        value = fields.get(name)
        if value not in (None, 0):
            raise fields.error(name, f"is {quoted(value)}, which is not supported")
    if not fields.boolean("attention.causal", default=True):
        raise fields.error("attention.causal", "is false; only causal models are supported")
    if rope_freqs is not None and architecture != "llama":
        raise CheckpointError(
            f"{where}: tensor rope_freqs.weight is supported for architecture llama only, the "
            f"file's is {architecture}"
        )
    try:
        return _ARCHITECTURES[architecture](
            _File(architecture, fields, tensor_names, vocab_size, rope_freqs)
        )
    except CheckpointError:
        raise
    except ValueError as error:  # ModelConfig's own checks do not know the file
        raise CheckpointError(f"{where}: {error}") from error


def _llama_config(file: _File) -> ModelConfig:
    """Llama, and Mistral: files of the latter say llama too. Where they name a window, all layers
    have it; llama.cpp's converter leaves it out.
    """
    _refuse(file.fields, WINDOW_PATTERN)
    sizes = read_gguf_sizes(file.fields)
    window = file.fields.integer(WINDOW, 0)
    return _decoder_config(
        file,
        sizes,
        attention_bias="blk.0.attn_q.bias" in file.tensor_names,
        layer_windows=(window,) * sizes["num_layers"] if window else (),
    )


def _qwen2_config(file: _File) -> ModelConfig:
    """Also Qwen2.5. Which layers would have a window, no key tells."""
    _refuse(file.fields, WINDOW)
    return _decoder_config(file, read_gguf_sizes(file.fields), attention_bias=True)


def _qwen3_config(file: _File) -> ModelConfig:
    _refuse(file.fields, WINDOW)
    return _decoder_config(
        file,
        read_gguf_sizes(file.fields),
        attention_bias="blk.0.attn_q.bias" in file.tensor_names,
        qk_norm=True,
    )


def _gemma3_config(file: _File) -> ModelConfig:
    fields, sizes = file.fields, read_gguf_sizes(file.fields)
    scaled_size = sizes["head_dim"]
    if sizes["num_layers"] == GEMMA3_27B_LAYERS:
        scaled_size = sizes["hidden_size"] // sizes["num_heads"]
    return ModelConfig(
        **sizes,
        architecture=file.architecture,
        vocab_size=file.vocab_size,
        tie_word_embeddings=file.has_no_head,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        attention_bias="blk.0.attn_q.bias" in file.tensor_names,
        attention_out_bias="blk.0.attn_output.bias" in file.tensor_names,
        qk_norm=True,
        activation="gelu_tanh",
        rope=read_gguf_rope(fields, sizes["head_dim"], sizes["context_length"], theta=None),
        local_rope=RopeConfig(theta=fields.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)),
        layer_windows=_gemma3_windows(fields, sizes["num_layers"]),
        attention_scale=scaled_size**-0.5,
    )


def _gemma3_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """The last of every `pattern` layers sees all; a file without the key has no window at all."""
    window = fields.integer(WINDOW, 0)
    pattern = fields.integer(WINDOW_PATTERN, GEMMA3_WINDOW_PATTERN)
    if pattern < 1:
        raise fields.error(WINDOW_PATTERN, f"must be at least 1, got {pattern}")
    if window == 0:
        return ()
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


def _gpt2_config(file: _File) -> ModelConfig:
    _refuse(file.fields, WINDOW)
    sizes = read_gguf_sizes(file.fields)
    if sizes["num_kv_heads"] != sizes["num_heads"]:
        raise file.fields.error("attention.head_count_kv", "must be as many as head_count")
    if sizes["num_heads"] * sizes["head_dim"] != sizes["hidden_size"]:
        raise file.fields.error(
            "embedding_length",
            f"{sizes['hidden_size']} must be {sizes['num_heads']} heads of {sizes['head_dim']}",
        )
    return ModelConfig(
        **sizes,
        architecture=file.architecture,
        vocab_size=file.vocab_size,
        tie_word_embeddings=file.has_no_head,
        norm_eps=file.fields.number("attention.layer_norm_epsilon"),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        rope=None,
        num_learned_positions=sizes["context_length"],
    )


_ARCHITECTURES: dict[str, Callable[[_File], ModelConfig]] = {
    "llama": _llama_config,
    "qwen2": _qwen2_config,
    "qwen3": _qwen3_config,
    "gemma3": _gemma3_config,
    "gpt2": _gpt2_config,
}


def _decoder_config(
    file: _File,
    sizes: GgufSizes,
    *,
    attention_bias: bool,
    qk_norm: bool = False,
    layer_windows: tuple[int | None, ...] = (),
) -> ModelConfig:
    """What Llama and the Qwens have in common."""
    return ModelConfig(
        **sizes,
        architecture=file.architecture,
        vocab_size=file.vocab_size,
        tie_word_embeddings=file.has_no_head,
        norm_eps=file.fields.number("attention.layer_norm_rms_epsilon"),
        attention_bias=attention_bias,
        attention_out_bias="blk.0.attn_output.bias" in file.tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensor_names,
        qk_norm=qk_norm,
        rope=read_gguf_rope(
            file.fields, sizes["head_dim"], sizes["context_length"], rope_freqs=file.rope_freqs
        ),
        layer_windows=layer_windows,
    )


def _refuse(fields: ConfigFields, name: str) -> None:
    if fields.get(name) not in (None, 0):
        raise fields.error(name, f"is {quoted(fields.get(name))}, which is not supported")
