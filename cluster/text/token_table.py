"""TokenTable: what each token id stands for, and how tokens join to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import decoders

from legato.text.library_errors import library_errors
from legato.text.token_bytes import byte_level_bytes, token_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from legato.text.token_bytes import TokenBytes


class TokenTable:
    """A copy of the tokenizer's id table, taken before anything is added to the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._decoder = tokenizer.decoder
        self._texts = {index: text for text, index in tokenizer.get_vocab().items()}
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}
        self.byte_level = isinstance(self._decoder, decoders.ByteLevel)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def last_id(self) -> int:
        """The largest id."""
        return max(self._texts)

    @property
    def longest_token(self) -> int:
        """Bytes of text (byte-level) or characters that one token can stand for at most."""
        return max(map(len, self._texts.values()))

    def answer_token(self, token_id: int) -> str | None:
        """The token as the decoder wants it; None where it adds nothing to an answer's text."""
        return None if token_id in self._special_ids else self._texts.get(token_id)

    def answer_bytes(self, token_id: int) -> bytes:
        """Byte-level only: the UTF-8 that the token adds to an answer's text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = byte_level_bytes(self.answer_token(token_id) or "")
        return known

    def join(self, tokens: Sequence[str]) -> str:
        """Text of tokens that stand side by side, by the tokenizer's own decoder."""
        if self._decoder is None:
            return " ".join(tokens)
        with library_errors("tokenizer.json: its decoder failed"):
            return str(self._decoder.decode(list(tokens)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer: special tokens and ids without a token add nothing."""
        tokens = [self.answer_token(token_id) for token_id in token_ids]
        return self.join([token for token in tokens if token is not None])

    def token_bytes(self, vocab_size: int) -> TokenBytes:
        """What each token adds to an answer; raises ValueError where that depends on others."""
        return token_bytes(self._texts, self._special_ids, self._decoder, vocab_size)

    def token_text(self, token_id: int) -> str:
        """One token for people to read."""
        token = self._texts.get(token_id)
        if token is None:
            return f"<token {token_id}>"
        if token_id in self._special_ids:
            return token
        if self.byte_level:
            return byte_level_bytes(token).decode("utf-8", errors="replace")
        return token.replace("\u2581", " ")  # SentencePiece's visible space
