"""RequestLog: what became of each request, when and on which workers, as lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class RequestLog:
    """Appends to one file, each line whole and at once; without a path it does nothing.

    `docs/operations.md` names the events and their fields. A line tells of no text and no token. A
    disk that takes no more ends the log, never a request.
    """

    def __init__(self, path: str | None, *, now: Callable[[], float] = time.time) -> None:
        """Raises OSError where the file cannot be opened."""
        self._now = now
        self._path = path
        # Line-buffered: a router that is killed has told what it did.
        self._file: TextIO | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115  # open as long as the router lives
        self._router = os.getpid()

    def note(self, event: str, **fields: str | int | None) -> None:
        """One line: when (Unix time, seconds), which router's process, what, and the fields."""
        if self._file is None:
            return
        line = {"at_s": self._now(), "router": self._router, "event": event, **fields}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("no more lines to the request log %s: %s", self._path, error)
            self.close()

    def close(self) -> None:
        """No more lines. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("the request log %s may lack its end: %s", self._path, error)
