"""StoredTensor: where one tensor's bytes lie in a file, as the file's header says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` is the file format's own name for it, such as "BF16" or "Q4_1"."""

    name: str  # as the file calls it
    file: Path
    dtype: str
    shape: tuple[int, ...]  # row-major, in elements
    start: int  # of its bytes, from the beginning of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.stop - self.start
