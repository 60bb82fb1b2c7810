"""Outbox: carries what the engine's thread has to tell to the event loop's mailboxes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.worker.mailbox import EngineEvent, Mailbox
    from legato.worker.sequence import Sequence

_log = logging.getLogger(__name__)


class Outbox:
    """Used by the engine's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mailboxes: dict[Sequence, Mailbox] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._mailboxes

    def open(self, sequence: Sequence, mailbox: Mailbox) -> None:
        """Its events go there."""
        self._mailboxes[sequence] = mailbox

    def close(self, sequence: Sequence) -> None:
        """Nobody listens to it any more."""
        self._mailboxes.pop(sequence, None)

    def publish(self, events: SequenceOf[tuple[Sequence, EngineEvent]]) -> None:
        """Hands all events over in one call: a wake-up of the loop costs more than an event."""
        if events:
            self.call(_deliver, [(self._mailboxes[s], event) for s, event in events])

    def call(self, function: Callable[[Any], None], argument: object) -> None:
        """On the loop, soon."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody is left to be told.
            _log.warning("the engine outlived the event loop")


def _deliver(events: list[tuple[Mailbox, EngineEvent]]) -> None:
    for mailbox, event in events:
        mailbox.put(event)
