"""printable, shown: what a peer, a library or a user wrote, for a sentence of ours."""

from __future__ import annotations

import reprlib

MAX_PRINTED_CHARS = 500
MAX_SHOWN_CHARS = 80  # of one value in a sentence
# Never walks the whole of a huge or deep value.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 4 * MAX_SHOWN_CHARS
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 16


def printable(text: str) -> str:
    """One line, bounded, without control characters: those are shown as their escapes."""
    if len(text) > MAX_PRINTED_CHARS:
        text = f"{text[:MAX_PRINTED_CHARS]}…"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shown(value: object) -> str:
    """A value for an error sentence, cut where it is long."""
    text = _REPR.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}…"
