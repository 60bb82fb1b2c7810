"""PrefixLog: which blocks have become findable and which not any more, for those who follow it."""

from __future__ import annotations

from collections import deque
from itertools import islice

SHORT_BYTES = 8  # of a hash; another prefix with the same ones misleads a router once in 2^32


def short(block_hash: bytes) -> int:
    """A block's hash as routers know it: its first bytes, little endian."""
    return int.from_bytes(block_hash[:SHORT_BYTES], "little")


class PrefixLog:
    """The last changes, numbered from 0; it has no lock, its owner has."""

    def __init__(self, max_changes: int = 16_384) -> None:
        self._changes: deque[tuple[int, bool]] = deque(maxlen=max_changes)
        self.end = 0  # the number of the next change

    def note(self, block_hash: bytes, *, added: bool) -> None:
        """One change."""
        self._changes.append((short(block_hash), added))
        self.end += 1

    def since(self, number: int, limit: int) -> tuple[dict[int, bool], int] | None:
        """From that number on, at most `limit` changes: what became of each hash, True where it was
        added; and the number to go on from. None: that far back is not known any more.
        """
        first = self.end - len(self._changes)
        if number < first:
            return None
        stop = min(self.end, number + limit)
        return dict(islice(self._changes, number - first, stop - first)), stop
