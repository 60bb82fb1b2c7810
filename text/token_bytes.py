"""token_bytes: the bytes that each token adds to an answer's text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import decoders

from legato.text.library_errors import library_errors
from legato.text.sentencepiece_bpe import SPACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# So many tokens are decoded both ways to see that a decoder is understood.
_NUM_COMPARED = 256


def byte_alphabet() -> dict[str, int]:
    """The byte that each printable stand-in character of byte-level BPE means."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(byte for byte in range(256) if chr(byte) not in table):
        table[chr(256 + shift)] = byte
    return table


BYTE_ALPHABET = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Of a token of byte-level BPE."""
    # Added tokens are written as plain text: a character outside the alphabet says so.
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


@dataclass(frozen=True)
class TokenBytes:
    """By id; b"" where a token adds nothing: control tokens, and ids without a token."""

    tokens: list[bytes]
    strips_first_space: bool  # one space at the very start of an answer is not part of its text


def token_bytes(
    texts: Mapping[int, str],
    special_ids: frozenset[int],
    decoder: Decoder | None,
    vocab_size: int,
) -> TokenBytes:
    """Of the ids in [0, vocab_size), where the model's logits are; `texts`: the tokenizer's.

    Raises:
        ValueError: what a token adds cannot be told from the token alone.
    """
    texts = {i: text for i, text in texts.items() if i < vocab_size and i not in special_ids}
    strips = False
    if isinstance(decoder, decoders.ByteLevel):
        known = {i: byte_level_bytes(text) for i, text in texts.items()}
    else:
        known, strips = _pieces(texts, decoder)
    return TokenBytes([known.get(i, b"") for i in range(vocab_size)], strips)


def _pieces(texts: Mapping[int, str], decoder: Decoder | None) -> tuple[dict[int, bytes], bool]:
    """SentencePiece's, with a decoder that makes spaces visible and may know bytes."""
    if decoder is None:
        raise ValueError("the tokenizer has no decoder")

    def decode(*tokens: str) -> str:
        with library_errors("tokenizer.json: its decoder failed"):
            return str(decoder.decode(list(tokens)))

    space = " " if decode("a", f"{SPACE}b") == "a b" else SPACE
    has_bytes = decode("a", "<0x42>", "c") == "aBc"
    known: dict[int, bytes] = {}
    for index, text in texts.items():
        match = _BYTE_TOKEN.fullmatch(text) if has_bytes else None
        known[index] = (
            bytes([int(match[1], 16)]) if match else text.replace(SPACE, space).encode("utf-8")
        )
    step = max(1, len(texts) // _NUM_COMPARED)
    for index in sorted(texts)[::step]:
        text = known[index].decode("utf-8", errors="replace")
        # Decoders treat the first token, and some the last, on its own.
        if decode("a", texts[index], "b") != f"a{text}b":
            raise ValueError(
                f"the tokenizer's decoder is a {type(decoder).__name__}, which does more than "
                "join its tokens"
            )
    return known, decode(f"{SPACE}a") == "a"
