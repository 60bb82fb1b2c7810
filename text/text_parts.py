"""TextParts: what a model's files say about text, before it is put to use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextParts:
    """The common ground of Hugging Face folders and GGUF files."""

    name: str
    tokenizer: Tokenizer  # no truncation, no padding
    special_ids: frozenset[int]  # control tokens: never text, neither in answers nor in prompts
    bos_id: int | None
    add_bos: bool  # prepend BOS to every prompt
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    no_template_reason: str  # where chat_template is None: what to do about it
    # "bos_token", "eos_token"…: what templates may refer to by name.
    template_names: Mapping[str, str] = field(default_factory=dict)
