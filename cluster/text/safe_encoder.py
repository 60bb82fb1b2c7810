"""SafeEncoder: text to ids, where only genuine control strings become control tokens."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from legato.cluster.errors import invalid, shown
from legato.cluster.text.lost_text import LostText
from legato.text.library_errors import library_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

# Private-use characters: none has a meaning that a prompt could need.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class SafeEncoder:
    """Encodes a whole prompt in one call of the tokenizer; thread-safe.

    The tokenizer is told to read its control strings as plain text. Each control token gets an
    alias, an added token whose text carries a random number made at load, so that no user can
    write it. Genuine control strings are replaced by their aliases before encoding, and the
    aliases' ids by the control tokens' after. So the tokenizer itself sees all the text at once
    and cuts it as it does without us.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: Iterable[int], last_id: int) -> None:
        self._tokenizer = tokenizer
        self._lost = LostText(tokenizer)
        nonce = secrets.token_hex(16)
        flags = tokenizer.get_added_tokens_decoder()
        tokens = {
            token_id: flags.get(token_id) or AddedToken(text)
            for token_id in sorted(special_ids)
            if (text := tokenizer.id_to_token(token_id))
        }
        tokenizer.encode_special_tokens = True
        self._fill_gaps(nonce, last_id)
        self._alias = {token.content: f"<|{nonce}-{id_}|>" for id_, token in tokens.items()}
        self._break = f"<|{nonce}-break|>"
        tokenizer.add_tokens(
            [
                AddedToken(
                    self._alias[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in tokens.values()
            ]
            + [AddedToken(self._break, normalized=False, special=False)]
        )
        self._real_id = {
            tokenizer.token_to_id(self._alias[token.content]): token_id
            for token_id, token in tokens.items()
        }
        self._break_id = tokenizer.token_to_id(self._break)
        words = {token.content for token in tokens.values() if token.single_word}
        self._control = _any_of(self._alias, words)
        # Matches nothing but the place, so that strings that overlap are all found.
        self._control_start = _any_of(self._alias, ahead=True)
        self._heads = {text[:size] for text in self._alias for size in range(1, len(text))}
        self._tails = {text[size:] for text in self._alias for size in range(1, len(text))}
        self._longest = max(map(len, self._alias), default=0)
        # Some tokenizers build a control token from its plain characters all the same.
        unsafe = [text for text in self._alias if not self._is_plain(text, tokens)]
        self._unsafe = _any_of(unsafe, ahead=True)

    def encode(self, text: str, *, parse_special_tokens: bool) -> list[int]:
        """Raw text; its control strings are genuine only if told so."""
        self._lost.check(text)
        return self._encode(self._arm(text) if parse_special_tokens else text)

    def encode_rendered(self, text: str, marker: str) -> list[int]:
        """A rendered template: control strings are genuine unless `disarm` marked them."""
        self._lost.check(text.replace(marker, ""))
        return self._encode(self._arm(text, marker).replace(marker, ""))

    def marker_for(self, texts: Iterable[str]) -> str:
        """A single character that stands in none of the texts."""
        used = set().union(*texts)
        for private in _PRIVATE_USE:
            for code in private:
                if chr(code) not in used:
                    return chr(code)
        raise invalid("messages: the contents use every private-use character of Unicode")

    def disarm(self, content: str, marker: str) -> str:
        """Marks control strings in a message, and what the text around it could complete to one.

        The mark stands behind a string's first character (before its last one, where the string
        began before the content), so that a template may still trim the content.
        """
        marks: set[int] = set()
        if self._control_start is not None:
            marks.update(found.start() + 1 for found in self._control_start.finditer(content))
        trimmed = content.strip()
        start = len(content) - len(content.lstrip())
        end = start + len(trimmed)
        for size in range(1, min(self._longest, len(trimmed) + 1)):
            if trimmed[-size:] in self._heads:
                marks.add(end - size + 1)
            if trimmed[:size] in self._tails:
                marks.add(start + size - 1)
        if len(trimmed) < self._longest - 1 and any(trimmed in text[1:-1] for text in self._alias):
            marks.add(start + 1)  # the template may have both ends
        pieces: list[str] = []
        last = 0
        for mark in sorted(marks):
            # A control string of one character has no inside: two marks behind it say it is plain.
            single = content[mark - 1 : mark] in self._alias
            pieces += (content[last:mark], marker * 2 if single else marker)
            last = mark
        return "".join([*pieces, content[last:]])

    def _arm(self, text: str, marker: str = "") -> str:
        def alias(found: re.Match[str]) -> str:
            # One mark behind a control string of one character may belong to what follows it.
            marked = marker and len(found[0]) == 1 and text.startswith(marker * 2, found.end())
            return found[0] if marked else self._alias[found[0]]

        return text if self._control is None else self._control.sub(alias, text)

    def _encode(self, text: str) -> list[int]:
        if self._unsafe is not None:
            text = self._break_up(text, self._unsafe)
        try:
            with library_errors("prompt: it cannot be tokenised"):
                ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError as error:
            raise invalid(str(error)) from error
        return [self._real_id.get(id_, id_) for id_ in ids if id_ != self._break_id]

    def _break_up(self, text: str, starts: re.Pattern[str]) -> str:
        """A break behind the first character of every control string, overlapping ones too."""
        pieces: list[str] = []
        last = 0
        for found in starts.finditer(text):
            pieces += (text[last : found.start() + 1], self._break)
            last = found.start() + 1
        return "".join([*pieces, text[last:]])

    def _is_plain(self, text: str, tokens: dict[int, AddedToken]) -> bool:
        with library_errors(f"tokenizer.json: it cannot tokenise {shown(text)}"):
            ids = set(self._tokenizer.encode(text, add_special_tokens=False).ids)
        # The unknown token controls nothing: any character that has no token gives it.
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        return tokens.keys().isdisjoint(ids - {self._tokenizer.token_to_id(unknown or "")})

    def _fill_gaps(self, nonce: str, last_id: int) -> None:
        """Vocabularies with holes: aliases must not get an id that is in use behind a hole."""
        filler = 0
        while self._tokenizer.get_vocab_size() <= last_id:
            before = self._tokenizer.get_vocab_size()
            filler += 1
            self._tokenizer.add_tokens([AddedToken(f"<|{nonce}-fill-{filler}|>", normalized=False)])
            if self._tokenizer.get_vocab_size() == before:
                raise ValueError(f"tokenizer.json: ids up to {last_id} for {before} tokens")


def _any_of(
    texts: Iterable[str], words: Iterable[str] = (), *, ahead: bool = False
) -> re.Pattern[str] | None:
    """Finds any of the texts, the longest first; `words` only between non-word characters."""
    whole = set(words)
    longest_first = sorted(texts, key=len, reverse=True)
    if not longest_first:
        return None
    either = "|".join(
        rf"(?<!\w){re.escape(text)}(?!\w)" if text in whole else re.escape(text)
        for text in longest_first
    )
    return re.compile(f"(?={either})" if ahead else either)
