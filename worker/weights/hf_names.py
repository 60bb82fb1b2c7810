"""hf_names: the one name for a tensor that Hugging Face's folders call by several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.weights.tensor_table import HEAD

if TYPE_CHECKING:
    from legato.worker.models.config import ModelConfig

# Where a multimodal Gemma 3 keeps its language model, as transformers 4 and 5 save it, …
_LANGUAGE_MODEL = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# … and what belongs to its other parts.
_VISION = ("vision_tower.", "multi_modal_projector.")


def canonical_name(name: str, config: ModelConfig) -> str | None:
    """The name in `tensor_table`; None for a tensor of a part that is not served."""
    if config.architecture == "gpt2":  # the oldest files hold the model without its head
        return name if name == HEAD or name.startswith("transformer.") else f"transformer.{name}"
    if config.architecture == "gemma3":
        if name.removeprefix("model.").startswith(_VISION):
            return None
        for prefix, ours in _LANGUAGE_MODEL.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
    return name
