"""Detokenizer: token ids to text, as they come, never half a character."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.text.token_table import TokenTable

# SentencePiece's spelling of a single byte. A whole run of them turns into U+FFFD if any one of it
# is wrong, so nothing of a run is certain before it ends.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """One answer's. The joined results of `push` and `flush` equal `ModelText.decode`."""

    def __init__(self, table: TokenTable) -> None:
        self._decoding: _Decoding = _Bytes(table) if table.byte_level else _Window(table)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is certain by now, maybe empty."""
        return "".join([self._decoding.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The rest, at the end: incomplete characters become U+FFFD, as in a full decode."""
        return self._decoding.flush()


class _Decoding(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """Byte-level BPE: tokens are bytes, and UTF-8 says where characters end."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._table.answer_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Any other decoder: decodes the last delivered tokens again, with and without the new ones.

    Decoders treat the first token on its own (a leading space goes) and the others alike, so the
    text that new tokens add is what they add behind a few delivered ones.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._tokens: list[str] = []  # the last delivered ones, then those held back
        self._delivered = 0  # how many of them
        self._retry_at = 0  # window size: bounds the work on text that stays uncertain for long

    def push(self, token_id: int) -> str:
        token = self._table.answer_token(token_id)
        if token is None:
            return ""
        self._tokens.append(token)
        if _BYTE_TOKEN.fullmatch(token) or len(self._tokens) < self._retry_at:
            return ""
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._table.join(self._tokens[: self._delivered])
        now = self._table.join(self._tokens)
        uncertain = now.endswith("\ufffd") or not now.startswith(before)
        if (uncertain and not final) or len(now) == len(before):
            self._retry_at = len(self._tokens) + 1 + len(self._tokens) // 4
            return ""
        self._tokens = self._tokens[self._delivered :]
        self._delivered = len(self._tokens)
        self._retry_at = 0
        return now[len(before) :]
