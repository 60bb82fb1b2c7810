"""transformers' own reading of a GGUF file of any architecture, as a second oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quick_gguf import quick_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


def transformers_reading(file: Path) -> PreTrainedModel:
    """In fp32. For tiny models: it is filled with random numbers first."""
    with quick_gguf():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model
