"""quoting: what a file says, made fit for a message: short, on one line, no control characters."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAMES = 5
MAX_CHARS = 200  # of one name or value
MAX_MESSAGE_CHARS = 6000  # a path may take 4096

# Never walks the whole of a huge or deep value.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 4 * MAX_CHARS
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 16
_REPR.maxlevel = 4


def quoted(value: object) -> str:
    """A value as Python writes it."""
    return _cut(_REPR.repr(value))


def bare(text: str) -> str:
    """A name without quotes, unless it has characters that need them."""
    start = text[: MAX_CHARS + 1]
    return _cut(start) if start.isprintable() else _cut(repr(start))


def join_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    text = ", ".join(bare(name) for name in ordered[:MAX_NAMES])
    more = len(ordered) - MAX_NAMES
    return f"{text} and {more} more" if more > 0 else text


def one_line(message: str) -> str:
    """A whole message, for what slipped in unquoted; a second time changes nothing."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}…"
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
