"""ModelText: a model's tokenizer, chat template and special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from legato.cluster.text.detokenizer import Detokenizer
    from legato.protos import generation_pb2


class ModelText:
    """Everything about text that the model's files say. Thread-safe once loaded."""

    name: str
    eos_token_ids: tuple[int, ...]  # generation_config.json's list, else the tokenizer's, else ()
    has_chat_template: bool
    num_tokens: int  # ids the tokenizer knows; the model's vocabulary may be larger

    @classmethod
    def load(cls, path: Path) -> ModelText:
        """Reads a Hugging Face folder or a .gguf file.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        raise NotImplementedError

    def encode_text(self, text: str, *, parse_special_tokens: bool = False) -> list[int]:
        """Tokenises raw text; exactly one BOS where the model wants one."""
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[generation_pb2.ChatMessage],
        *,
        parse_special_tokens: bool = False,
    ) -> list[int]:
        """Renders the chat template with a generation prompt, and tokenises.

        Raises:
            RequestError: no template, or the template refuses the messages.
        """
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer; special tokens are left out."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """One token's text for people to read, special tokens included."""
        raise NotImplementedError

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer for one answer."""
        raise NotImplementedError
