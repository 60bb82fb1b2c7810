"""hf_config: Hugging Face's config.json, in its old and new spellings, as a ModelConfig."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.models.config_fields import ConfigFields, require_causal
from legato.worker.models.hf_gemma3_config import gemma3_config, gemma3_multimodal_config
from legato.worker.models.hf_gpt2_config import gpt2_config
from legato.worker.models.hf_llama_config import (
    llama_config,
    mistral_config,
    qwen2_config,
    qwen3_config,
)
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import bare, quoted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from legato.worker.models.config import ModelConfig

# Far above any model's config or index; what is larger could take gigabytes once parsed.
MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class _Family:
    model_type: str
    read: Callable[[ConfigFields], ModelConfig]


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", llama_config),
    "MistralForCausalLM": _Family("mistral", mistral_config),
    "Qwen2ForCausalLM": _Family("qwen2", qwen2_config),
    "Qwen3ForCausalLM": _Family("qwen3", qwen3_config),
    "Gemma3ForCausalLM": _Family("gemma3_text", gemma3_config),
    "Gemma3ForConditionalGeneration": _Family("gemma3", gemma3_multimodal_config),
    "GPT2LMHeadModel": _Family("gpt2", gpt2_config),
}
SUPPORTED = (
    f"supported are {', '.join(_FAMILIES)} "
    f"(model_type {', '.join(family.model_type for family in _FAMILIES.values())})"
)


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(_read_bounded(path))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def _read_bounded(path: Path) -> str:
    """The text of a regular file: a pipe would be waited for, and a device never ends."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: cannot be read: it is not a file")
    with path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes, the most allowed")
    return raw.decode("utf-8")


def model_config(values: dict[str, object], where: str) -> ModelConfig:
    """The model that a config.json describes; `where` names the file in errors.

    Raises:
        CheckpointError: something is missing, malformed or not served by this engine.
    """
    fields = ConfigFields(values, where)
    family = _FAMILIES[_architecture(fields)]
    require_causal(fields)
    try:
        return family.read(fields)
    except CheckpointError:
        raise
    except ValueError as error:  # ModelConfig's own checks do not know the file
        raise CheckpointError(f"{where}: {error}") from error


def _architecture(fields: ConfigFields) -> str:
    """The architecture named, or the one that belongs to model_type."""
    names = fields.get("architectures")
    model_type = fields.get("model_type")
    if names is not None:
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise fields.error("architectures", f"must be a list of one name, got {quoted(names)}")
        architecture = names[0]
        if architecture not in _FAMILIES:
            raise fields.error("architectures", f"is {bare(architecture)}; {SUPPORTED}")
        if model_type not in (None, _FAMILIES[architecture].model_type):
            raise fields.error(
                "model_type", f"is {quoted(model_type)}, which does not belong to {architecture}"
            )
        return architecture
    if model_type is None:
        raise fields.error("model_type", f"and architectures are missing; {SUPPORTED}")
    for architecture, family in _FAMILIES.items():
        if family.model_type == model_type:
            return architecture
    raise fields.error("model_type", f"is {quoted(model_type)}; {SUPPORTED}")
