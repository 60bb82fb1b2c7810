"""RoomNotes: the engine hears who waits for room, and when nobody does any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.handoff.room_notes import RoomNotes
from legato.worker.handoff.wanted_room import WANTED_FOR_S
from legato.worker.scheduling.claim import Newcomer

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeEngine:
    def __init__(self) -> None:
        self.heard: list[list[Newcomer] | str] = []

    def note_waiting(self, wanted: list[Newcomer]) -> None:
        self.heard.append(list(wanted))

    def wake(self) -> None:
        self.heard.append("wake")


class FakeTimer:
    def __init__(self, timers: list[FakeTimer], delay: float, call: Callable[[], None]) -> None:
        self.delay, self.call, self._timers = delay, call, timers
        timers.append(self)

    def cancel(self) -> None:
        if self in self._timers:  # else it is over: no fault
            self._timers.remove(self)


class FakeLoop:
    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []

    def call_later(self, delay: float, call: Callable[[], None]) -> FakeTimer:
        return FakeTimer(self.timers, delay, call)


def test_the_engine_is_told_again_when_the_last_has_stopped_waiting() -> None:
    engine, loop, wanted = FakeEngine(), FakeLoop(), list[Newcomer]()
    notes = RoomNotes(engine, lambda: wanted, loop)  # type: ignore[arg-type]  # what it uses of them
    notes.tell()
    assert engine.heard == ["wake"]
    assert not loop.timers, "nobody to be forgotten"
    one, two = Newcomer(1, 4, 4), Newcomer(2, 4, 3)
    wanted.append(one)
    notes.tell()
    wanted.append(two)
    notes.tell()
    assert engine.heard[1:] == [[one], [one, two]]
    [timer] = loop.timers  # one, however often it is told
    assert timer.delay == WANTED_FOR_S
    wanted.clear()
    loop.timers.clear()
    timer.call()
    assert engine.heard[3:] == [[]]
    assert not loop.timers
    notes.tell()
    assert engine.heard[4:] == ["wake"]
