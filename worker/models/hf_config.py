"""hf_config: Hugging Face's config.json, in its old and new spellings, as a ModelConfig."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.worker.models.config import ModelConfig
from legato.worker.models.config_fields import ConfigFields
from legato.worker.models.hf_rope import read_hf_rope
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

SUPPORTED = (
    "supported are LlamaForCausalLM, and MistralForCausalLM where sliding_window is null "
    "(model_type llama or mistral)"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class _Family:
    """What transformers takes for granted where config.json is silent."""

    model_type: str
    context_length: int
    num_kv_heads: int | None  # None: as many as query heads
    has_bias_fields: bool


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048, None, has_bias_fields=True),
    "MistralForCausalLM": _Family("mistral", 131072, 8, has_bias_fields=False),
}


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def model_config(values: dict[str, object], where: str) -> ModelConfig:
    """The model that a config.json describes; `where` names the file in errors.

    Raises:
        CheckpointError: something is missing, malformed or not served by this engine.
    """
    fields = ConfigFields(values, where)
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields)
    if architecture == "MistralForCausalLM":
        _refuse_sliding_window(fields, values)

    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    context_length = fields.integer("max_position_embeddings", family.context_length)
    rope = read_hf_rope(fields, context_length)
    # Mistral's config has no such fields, and transformers does not look at them there.
    has_bias_fields = family.has_bias_fields
    try:
        return ModelConfig(
            architecture="llama",  # the code that serves both families
            num_layers=fields.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, values, family, num_heads),
            head_dim=_head_dim(fields, hidden_size, num_heads),
            vocab_size=fields.integer("vocab_size"),
            context_length=context_length,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            attention_bias=has_bias_fields and fields.boolean("attention_bias", default=False),
            mlp_bias=has_bias_fields and fields.boolean("mlp_bias", default=False),
            rope=rope,
        )
    except CheckpointError:
        raise
    except ValueError as error:  # ModelConfig's own checks do not know the file
        raise CheckpointError(f"{where}: {error}") from error


def declared_dtype(values: dict[str, object], where: str) -> torch.dtype | None:
    """The dtype that config.json says the weights are in (`dtype`, once `torch_dtype`)."""
    fields = ConfigFields(values, where)
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is None:
            continue
        dtype = DTYPES.get(fields.text(name).removeprefix("torch."))
        if dtype is None:
            raise fields.error(name, f"is {fields.text(name)!r}; supported are {', '.join(DTYPES)}")
        return dtype
    return None


def _architecture(fields: ConfigFields) -> str:
    """The architecture named, or the one that belongs to model_type."""
    names = fields.get("architectures")
    model_type = fields.get("model_type")
    if names is not None:
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise fields.error("architectures", f"must be a list of one name, got {names!r}")
        architecture = names[0]
        if architecture not in _FAMILIES:
            raise fields.error("architectures", f"is {architecture}; {SUPPORTED}")
        if model_type not in (None, _FAMILIES[architecture].model_type):
            raise fields.error(
                "model_type", f"is {model_type!r}, which does not belong to {architecture}"
            )
        return architecture
    if model_type is None:
        raise fields.error("model_type", f"and architectures are missing; {SUPPORTED}")
    for architecture, family in _FAMILIES.items():
        if family.model_type == model_type:
            return architecture
    raise fields.error("model_type", f"is {model_type!r}; {SUPPORTED}")


def _refuse_unsupported(fields: ConfigFields) -> None:
    for name in ("quantization_config", "compression_config", "quantization"):
        settings = fields.get(name)
        if settings is None:
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise fields.error(
            name,
            f"says that the weights are quantised (method {method or 'not named'}), which is not "
            "supported; use the unquantised model or a GGUF file",
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise fields.error("hidden_act", f"is {activation!r}; only silu is supported")


def _refuse_sliding_window(fields: ConfigFields, values: dict[str, object]) -> None:
    window = fields.get("sliding_window")
    if window is not None:
        raise fields.error(
            "sliding_window",
            f"is {window!r}, and sliding-window attention is not supported; {SUPPORTED}",
        )
    if "sliding_window" not in values:
        raise fields.error(
            "sliding_window", f"is missing, which means 4096 for Mistral; {SUPPORTED}"
        )


def _num_kv_heads(
    fields: ConfigFields, values: dict[str, object], family: _Family, num_heads: int
) -> int:
    # An explicit null means "as many as query heads" in either family.
    if "num_key_value_heads" in values or family.num_kv_heads is None:
        return fields.integer("num_key_value_heads", num_heads)
    return family.num_kv_heads


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if num_heads < 1 or hidden_size % num_heads:
        raise fields.error(
            "hidden_size",
            f"{hidden_size} must be a multiple of num_attention_heads {num_heads} "
            "where head_dim is not given",
        )
    return hidden_size // num_heads
