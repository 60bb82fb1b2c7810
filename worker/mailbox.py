"""Mailbox: what the engine tells the call that owns a sequence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.sampler import Sampled
    from legato.worker.sequence import FinishReason


class EngineDiedError(Exception):
    """The engine failed at something that is its own fault; the process ends."""


@dataclass(frozen=True)
class JoinedEvent:
    """The sequence is in the batch of the step that now begins."""


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token, with the sequence's figures as they stood after that step."""

    sampled: Sampled
    index: int  # in the answer, from 0
    finish_reason: FinishReason | None
    num_forwards: int
    model_s: float
    wait_s: float  # submitted until its first step began
    answer: int = 0  # of a prefilled sequence with several answers; their events come together
    num_swaps: int = 0  # times that its KV was moved to the host's memory, so far


@dataclass(frozen=True)
class BrokenEvent:
    """The answer ends without the token at `index`: the model gave no usable logits, or its guide
    cannot go on. Of a prefilled sequence with several answers, all of them.
    """

    index: int  # in the answer, from 0
    guide_failure: str | None = None  # why, where it is the guide's


@dataclass(frozen=True)
class PreemptedEvent:
    """The sequence had to leave for want of KV blocks, perhaps before it ever joined. Its tokens
    were told before, and it goes on from them in another sequence.
    """

    num_preemptions: int  # so far


@dataclass(frozen=True)
class ParkedEvent:
    """The sequence is out of the batch, to be moved; all its tokens were told."""

    number: int  # of the move
    num_rows: int  # of KV in its blocks: of all its tokens but the last


EngineEvent = JoinedEvent | TokenEvent | BrokenEvent | PreemptedEvent | ParkedEvent


class Mailbox:
    """Used on the event loop only. It never holds more than one event a token."""

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._failure: EngineDiedError | None = None
        self._changed = asyncio.Event()

    def put(self, event: EngineEvent) -> None:
        """Adds an event and wakes the reader."""
        self._events.append(event)
        self._changed.set()

    def fail(self, failure: EngineDiedError) -> None:
        """Makes the next `take` raise."""
        self._failure = failure
        self._changed.set()

    async def take(self) -> list[EngineEvent]:
        """All events since the last call, at least one; raises EngineDiedError."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events
