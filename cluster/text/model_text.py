"""ModelText: a model's tokenizer, chat template and special tokens."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError, invalid
from legato.cluster.text.chat_template import ChatTemplate
from legato.cluster.text.detokenizer import Detokenizer
from legato.cluster.text.safe_encoder import SafeEncoder
from legato.cluster.text.token_table import TokenTable
from legato.text.guide_book import GuideBook
from legato.text.guide_vocabulary import GuideVocabulary
from legato.text.load_text import load_text_parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from legato.protos import generation_pb2
    from legato.text.text_parts import TextParts

CHAT_ROLES = ("system", "user", "assistant")


class ModelText:
    """Everything about text that the model's files say. Thread-safe once loaded.

    Control strings ("<|im_end|>") in `text` and in the contents of messages are plain text unless
    `parse_special_tokens` is set; those that the chat template writes are always control tokens.
    Added tokens that the model's files call plain text ("special": false) are always found.
    """

    name: str
    # generation_config.json's list, else the tokenizer's, else config.json's, else ().
    # Of a .gguf file: see `load_gguf_text`.
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    num_tokens: int  # ids the tokenizer knows; the model's vocabulary may be larger
    # No token stands for more characters: longer prompts can be refused without reading them.
    max_chars_per_token: int
    chat_roles: tuple[str, ...]  # "tool" is one only where the template has a word for it

    def __init__(self, parts: TextParts) -> None:
        self.name = parts.name
        self.eos_token_ids = parts.eos_token_ids
        self._no_template_reason = parts.no_template_reason
        self._table = TokenTable(parts.tokenizer, parts.special_ids)
        self.num_tokens = len(self._table)
        self._guides: dict[int, GuideBook] = {}
        self._lock = threading.Lock()
        self.max_chars_per_token = self._table.longest_token
        # From here on the tokenizer holds the encoder's aliases too.
        self._encoder = SafeEncoder(parts.tokenizer, parts.special_ids, self._table.last_id)
        self._bos_id = parts.bos_id if parts.add_bos else None
        self._template: ChatTemplate | None = None
        if parts.chat_template is not None:
            self._template = ChatTemplate(parts.chat_template, parts.template_names)
        self.has_chat_template = self._template is not None
        knows_tools = self._template is not None and self._template.names_role("tool")
        self.chat_roles = (*CHAT_ROLES, "tool") if knows_tools else CHAT_ROLES

    @classmethod
    def load(cls, path: Path) -> ModelText:
        """Reads a Hugging Face folder or a .gguf file.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        return cls(load_text_parts(path))

    def guides(self, vocab_size: int) -> GuideBook:
        """For guides over a model whose logits have that size."""
        with self._lock:
            book = self._guides.get(vocab_size)
            if book is None:
                book = GuideBook(lambda: GuideVocabulary(self._table.token_bytes(vocab_size)))
                self._guides = {vocab_size: book}  # a service has one model
            return book

    def encode_text(
        self, text: str, *, parse_special_tokens: bool = False, add_bos: bool = True
    ) -> list[int]:
        """Tokenises raw text; exactly one BOS where the model wants one, none without `add_bos`."""
        ids = self._encoder.encode(text, parse_special_tokens=parse_special_tokens)
        return self._with_bos(ids) if add_bos else ids

    def encode_chat(
        self,
        messages: Sequence[generation_pb2.ChatMessage],
        *,
        parse_special_tokens: bool = False,
        max_chars: int | None = None,
    ) -> list[int]:
        """Renders the chat template with a generation prompt, and tokenises.

        BOS is added where the model wants one and the template does not write it. `max_chars`
        bounds the rendered text.

        Raises:
            RequestError: no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"messages: {self._no_template_reason}; send the whole prompt as `text` or"
                " `token_ids`, or serve a model that has a chat template",
                reason=Reason.NO_CHAT_TEMPLATE,
            )
        contents = [message.content for message in messages]
        marker = self._encoder.marker_for([*contents, *self._template.texts])
        if not parse_special_tokens:
            contents = [self._encoder.disarm(content, marker) for content in contents]
        rendered = self._template.render(
            [
                {"role": message.role, "content": content}
                for message, content in zip(messages, contents, strict=True)
            ],
            max_chars=max_chars,
        )
        ids = self._encoder.encode_rendered(rendered, marker)
        if not ids:
            raise invalid("messages: the chat template renders them to an empty prompt")
        return self._with_bos(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer; special tokens and ids without a token are left out."""
        return self._table.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token's text for people to read, special tokens included."""
        return self._table.token_text(token_id)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer for one answer."""
        return Detokenizer(self._table)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]
