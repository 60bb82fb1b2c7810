"""StopMatcher: finds stop strings in a stream of text and holds back what may become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """One answer's. Text that may be the start of a stop string is held until that is decided."""

    def __init__(self, stop: Sequence[str]) -> None:
        raise NotImplementedError

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        raise NotImplementedError

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes new text; returns what may be delivered. After a match it returns nothing more.

        With `may_stop` false (min_tokens not reached), text passes and a match in it is ignored.
        """
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back, at an end that is no stop string."""
        raise NotImplementedError
