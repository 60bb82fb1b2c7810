"""RoomNotes: what a decode engine is told of the tickets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.handoff.wanted_room import WANTED_FOR_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from legato.worker.engine import Engine
    from legato.worker.scheduling.claim import Newcomer


class RoomNotes:
    """Blocks that a ticket gave back may be what a sequence waits for; and sequences of lower
    priority make room for who waits to be let in. Who has stopped waiting says nothing, so the
    engine is told again when the time of the last is over. Used on the event loop only.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: Callable[[], list[Newcomer]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._loop = loop
        self._told_of_some = False
        self._again: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """The tickets have changed."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        wanted = self._wanted()
        if wanted or self._told_of_some:
            self._engine.note_waiting(wanted)
        else:
            self._engine.wake()
        self._told_of_some = bool(wanted)
        if wanted:
            self._again = self._loop.call_later(WANTED_FOR_S, self.tell)
