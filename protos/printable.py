"""printable: what a peer or a library wrote, for a sentence of ours."""

from __future__ import annotations

MAX_PRINTED_CHARS = 500


def printable(text: str) -> str:
    """One line, bounded, without control characters: those are shown as their escapes."""
    if len(text) > MAX_PRINTED_CHARS:
        text = f"{text[:MAX_PRINTED_CHARS]}…"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
