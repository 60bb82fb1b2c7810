"""WantedRoom: the requests that were refused for want of room a moment ago."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.scheduling.claim import Newcomer

# The router asks again within this, if the request still waits: nobody says that it does not.
WANTED_FOR_S = 1.0


class WantedRoom:
    """Each stays for `WANTED_FOR_S`, or until one like it comes in. Used on the event loop only."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # By what a request keeps when it asks again: its arrival and its size.
        self._entries: dict[tuple[int, int, int], tuple[Newcomer, float]] = {}

    def add(self, arrival: int, newcomer: Newcomer) -> None:
        """It was refused now."""
        self._entries[_key(arrival, newcomer)] = newcomer, self._now() + WANTED_FOR_S

    def discard(self, arrival: int, newcomer: Newcomer) -> bool:
        """It has come in. Returns whether it was refused a moment ago."""
        return self._entries.pop(_key(arrival, newcomer), None) is not None

    def newcomers(self) -> list[Newcomer]:
        """Those that are still thought to wait, the first to arrive first."""
        now = self._now()
        self._entries = {k: entry for k, entry in self._entries.items() if entry[1] > now}
        return [self._entries[key][0] for key in sorted(self._entries)]


def _key(arrival: int, newcomer: Newcomer) -> tuple[int, int, int]:
    return arrival, newcomer.rows, newcomer.num_answers
