"""Turns: whose frame is next on a link."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.handoff.transfer import Control, Piece, Transfer


class Turns:
    """Opens and Closes first, for they are small and others wait for them; then the transfers'
    rows in turn, a chunk each, so that a short one waits for one chunk of each long one at most.
    """

    def __init__(self) -> None:
        self._new: dict[Transfer, None] = {}  # something has changed
        self._rows: dict[Transfer, None] = {}  # may have rows; the next one first

    def add(self, transfer: Transfer) -> None:
        """It may have something to send now."""
        self._new[transfer] = None

    def next(self, most_bytes: int, now_s: float) -> tuple[Transfer, Control | Piece] | None:
        """What to send now; `most_bytes`: of rows, 0 where there is no room for any."""
        while self._new:
            transfer = next(iter(self._new))
            del self._new[transfer]
            self._rows.setdefault(transfer)
            if (control := transfer.control()) is not None:
                return transfer, control
        while most_bytes and self._rows:
            transfer = next(iter(self._rows))
            del self._rows[transfer]
            if (piece := transfer.take_piece(now_s, most_bytes)) is not None:
                self._rows[transfer] = None
                return transfer, piece
        return None
