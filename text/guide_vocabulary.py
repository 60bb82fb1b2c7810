"""GuideVocabulary: a model's tokens as llguidance takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from legato.text.load_text import load_text_parts
from legato.text.token_bytes import token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from legato.text.token_bytes import TokenBytes

# Of text that a guide leaves no choice about, so much is cut into tokens at once.
_MAX_FORCED_BYTES = 64


class GuideVocabulary:
    """Where the model's logits end, one more token stands: it means that the text may end here.
    So a guide knows nothing of the tokens that end a certain request's answer.

    Thread-safe: nothing of it changes.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self.num_tokens = len(tokens.tokens)  # those that the model has logits for
        self.end_id = self.num_tokens
        # Of a mask: int32, 32 tokens each, and as many as llguidance fills.
        self.num_words = (self.num_tokens + 1) // 32 + 1
        self._bytes = tokens.tokens
        self._greedy = _LongestTokens(tokens.tokens)
        self.tokenizer = LLTokenizer(_Tokens(tokens.tokens, self._greedy))
        # What the first token of an answer is to a guide, where the answer's text begins later.
        self.first_tokenizer: LLTokenizer | None = None
        if tokens.strips_first_space:
            stripped = [token.removeprefix(b" ") for token in tokens.tokens]
            self.first_tokenizer = LLTokenizer(_Tokens(stripped, _LongestTokens(stripped)))
        bits = np.zeros(self.num_words * 32, np.bool_)
        bits[: self.num_tokens] = [bool(token) for token in tokens.tokens]
        bits[self.end_id] = True
        self.text_mask: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> GuideVocabulary:
        """Of a model's folder or .gguf file; `vocab_size`: of its logits.

        Raises:
            ValueError: the files are wrong, or the tokenizer is none that guides work with.
        """
        parts = load_text_parts(path)
        texts = {index: text for text, index in parts.tokenizer.get_vocab().items()}
        return cls(token_bytes(texts, parts.special_ids, parts.tokenizer.decoder, vocab_size))

    def is_text(self, token_id: int) -> bool:
        """Whether the token adds anything to a text."""
        return 0 <= token_id < self.num_tokens and bool(self._bytes[token_id])

    def ends(self, eos_token_ids: Iterable[int], stop_token_ids: Iterable[int]) -> GuideEnds:
        """Which tokens end an answer whose text is complete."""
        eos = frozenset(i for i in eos_token_ids if 0 <= i < self.num_tokens)
        stops = frozenset(
            i for i in stop_token_ids if 0 <= i < self.num_tokens and not self.is_text(i)
        )
        return GuideEnds(eos, stops - eos)

    def as_fed(self, token_id: int, position: int) -> list[int]:
        """The tokens that mean to a guide what this one adds to the text."""
        if position or self.first_tokenizer is None or self._bytes[token_id][:1] != b" ":
            return [token_id]
        return self._greedy(self._bytes[token_id][1:])


@dataclass(frozen=True)
class GuideEnds:
    """Tokens that end a request's answer and add no text to it."""

    eos: frozenset[int]
    stops: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.eos or self.stops)


class _LongestTokens:
    """Cuts bytes into the longest tokens that there are, one after the other."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._ids = {token: index for index, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for size in range(min(self._longest, len(text) - start), 0, -1):
                token_id = self._ids.get(text[start : start + size])
                if token_id is not None:
                    ids.append(token_id)
                    start += size
                    break
            else:
                break  # no token has that byte
        return ids


class _Tokens(TokenizerWrapper):
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], cut: _LongestTokens) -> None:
        # Not the parent's, which wraps a tokenizer of another kind.
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [self.eos_token_id]
        self._cut = cut

    def __call__(self, text: str) -> list[int]:
        """Of text that is forced: only the first token of it is used."""
        return self._cut(text[:_MAX_FORCED_BYTES].encode("utf-8"))
