"""SendTimes: when the engine handed each token to gRPC, in memory that both processes map."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


class SendTimes:
    """[streams, tokens] seconds of the machine's monotonic clock, the same one in every process."""

    def __init__(self, path: Path, num_streams: int, num_tokens: int, *, create: bool) -> None:
        """The engine creates the file and writes; the load only reads."""
        num_bytes = num_streams * num_tokens * 8
        if create:
            path.write_bytes(bytes(num_bytes))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        self.seconds = np.frombuffer(self._memory, np.float64).reshape(num_streams, num_tokens)
