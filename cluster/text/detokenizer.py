"""Detokenizer: token ids to text, as they come, never half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Detokenizer:
    """One answer's. The joined results of `push` and `flush` equal `ModelText.decode`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is certain by now, maybe empty."""
        raise NotImplementedError

    def flush(self) -> str:
        """The rest, at the end: incomplete characters become U+FFFD, as in a full decode."""
        raise NotImplementedError
