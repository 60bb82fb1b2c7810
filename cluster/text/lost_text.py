"""LostText: characters that a tokenizer would leave out of a prompt without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import decoders, models, pre_tokenizers

from legato.cluster.errors import invalid
from legato.text.sentencepiece_bpe import SPACE
from legato.text.token_bytes import BYTE_ALPHABET

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UTF8_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}  # no text has the others


class LostText:
    """Refuses prompts that would get a hole; made before anything is added to the tokenizer.

    BPE without an unknown token drops what it has no token for. Byte-level BPE has a token for
    each byte, but training keeps only those it saw: SmolLM's lacks several control characters.
    SentencePiece's kind drops characters that it neither knows nor has the bytes of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = b""  # whatever holds one of these is lost
        self._tokenizer: Tokenizer | None = None  # asked about each character, if there is one
        model = tokenizer.model
        if not isinstance(model, models.BPE) or model.unk_token is not None:
            return
        added = tokenizer.get_added_tokens_decoder().values()
        self._in_added = set("".join(token.content for token in added))
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            kept = set("".join(self._in_added).encode())
            self._bytes = bytes(
                byte
                for char, byte in BYTE_ALPHABET.items()
                if model.token_to_id(char) is None and byte not in kept and byte in _UTF8_BYTES
            )
        elif isinstance(tokenizer.pre_tokenizer, (type(None), *_WHOLE_CHARACTERS)) and not (
            model.byte_fallback and all(_has_byte(model, byte) for byte in _UTF8_BYTES)
        ):
            self._tokenizer = tokenizer

    def check(self, text: str) -> None:
        """Raises RequestError, INVALID_ARGUMENT, with the first such character and its place."""
        lost: set[str] = set()
        if self._bytes:
            data = text.encode("utf-8", errors="surrogatepass")
            if len(data.translate(None, self._bytes)) != len(data):
                lost = {
                    char
                    for char in set(text)
                    if any(byte in self._bytes for byte in char.encode("utf-8", "surrogatepass"))
                }
        elif self._tokenizer is not None:
            lost = {char for char in set(text) if self._is_lost(char, self._tokenizer)}
        if lost:
            index = next(index for index, char in enumerate(text) if char in lost)
            raise invalid(
                f"the prompt has U+{ord(text[index]):04X} at character {index}, limit characters"
                " that the model's tokens can spell"
            )

    def _is_lost(self, char: str, tokenizer: Tokenizer) -> bool:
        model = tokenizer.model
        assert isinstance(model, models.BPE)
        if char in self._in_added:
            return False
        normalizer = tokenizer.normalizer
        seen = char if normalizer is None else normalizer.normalize_str(char)
        if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
            seen = seen.replace(" ", SPACE)
        return any(
            model.token_to_id(part) is None
            and not (
                model.byte_fallback
                and all(_has_byte(model, byte) for byte in part.encode("utf-8", "surrogatepass"))
            )
            for part in seen
        )


# Pre-tokenizers that leave characters what they are.
_WHOLE_CHARACTERS = (pre_tokenizers.Metaspace, pre_tokenizers.Split)


def _has_byte(model: models.BPE, byte: int) -> bool:
    return model.token_to_id(f"<0x{byte:02X}>") is not None
