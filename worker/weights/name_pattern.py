"""NamePattern: a regular expression out of a checkpoint's config, matched in linear time."""

from __future__ import annotations

import re2

MAX_CHARS = 1000  # of a pattern
MAX_PATTERNS = 1000  # of a scheme
_MAX_BYTES = 8 << 20  # that a compiled pattern may take


class NamePattern:
    """What RE2 knows: no look-around, no back-references. `re` has them, and for a hostile pattern
    more ways through a name than anybody can wait for.
    """

    def __init__(self, pattern: str) -> None:
        """
        Raises:
            ValueError: it is something else, or too long.
        """
        if len(pattern) > MAX_CHARS:
            raise ValueError(f"has {len(pattern)} characters, at most {MAX_CHARS} are allowed")
        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MAX_BYTES
        try:
            self._compiled = re2.compile(pattern, options)
        except (re2.error, UnicodeEncodeError) as error:
            raise ValueError(f"is no regular expression of RE2's: {_text(error)}") from error

    def matches(self, name: str) -> bool:
        """Whether it matches at the start of `name`."""
        return self._compiled.match(name) is not None


def _text(error: Exception) -> str:
    """RE2's errors hold bytes."""
    first = error.args[0] if error.args else ""
    return first.decode(errors="replace") if isinstance(first, bytes) else str(error)
