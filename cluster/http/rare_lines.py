"""RareLines: a flood of wrong requests must not fill the log."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S = 10.0


class RareLines(logging.Filter):
    """Of each message up to WARNING one line each PERIOD_S, with how many were left out before it.

    For a logger whose messages are a few constant texts.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._last: dict[str, tuple[float, int]] = {}  # when it was let through, and left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if record.levelno > logging.WARNING:
            return True
        now_s, message = self._now(), str(record.msg)
        at_s, num_left_out = self._last.get(message, (-math.inf, 0))
        if now_s - at_s < PERIOD_S:
            self._last[message] = at_s, num_left_out + 1
            return False
        self._last[message] = now_s, 0
        if num_left_out:
            record.msg = f"{message} ({num_left_out} more since the last such line)"
        return True


def write_rarely(logger: logging.Logger) -> None:
    """Idempotent."""
    if not any(isinstance(known, RareLines) for known in logger.filters):
        logger.addFilter(RareLines())
