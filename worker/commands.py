"""CommandQueue: what the event loop asks of the engine's thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.mailbox import Mailbox
    from legato.worker.scheduling.claim import Newcomer
    from legato.worker.sequence import Sequence


@dataclass(frozen=True)
class Submit:
    """Takes a sequence in."""

    sequence: Sequence
    mailbox: Mailbox


@dataclass(frozen=True)
class Fork(Submit):
    """Takes in one that goes on from another's rows. See `CapacityScheduler.fork`."""

    source: int | None


@dataclass(frozen=True)
class Release:
    """Takes a sequence out and ends its hold on its blocks."""

    sequence: Sequence
    stopped: bool  # its answer has ended, by what the engine cannot see


@dataclass(frozen=True)
class Park:
    """Takes a sequence out of the batch, for the move of that number. See `Parking`."""

    sequence: Sequence
    number: int


@dataclass(frozen=True)
class Resume:
    """Lets a sequence that was to be moved go on."""

    sequence: Sequence


@dataclass(frozen=True)
class NoteWaiting:
    """Who waits to be admitted to decode, the first first."""

    wanted: list[Newcomer]


Command = Submit | Release | Park | Resume | NoteWaiting


class CommandQueue:
    """Guarded by `changed`, which the thread holds while it takes commands, applies them and
    schedules, never during a forward pass. Methods say where the caller must hold it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._commands: list[Command] = []
        self._woken = False
        self._stopping = False

    def put(self, command: Command) -> None:
        """Adds one, and wakes the thread."""
        with self.changed:
            self._commands.append(command)
            self.changed.notify()

    def wake(self) -> None:
        """Ends the thread's wait, or the next one."""
        with self.changed:
            self._woken = True
            self.changed.notify()

    def stop(self) -> None:
        """The thread shall end."""
        with self.changed:
            self._stopping = True
            self.changed.notify()

    @property
    def stopping(self) -> bool:
        """Whether it shall. With `changed` held."""
        return self._stopping

    def submitted(self) -> list[Sequence]:
        """Those that no `take` has seen. With `changed` held."""
        return [c.sequence for c in self._commands if isinstance(c, Submit)]

    def take(self) -> list[Command]:
        """All, in order. With `changed` held."""
        commands, self._commands = self._commands, []
        self._woken = False
        return commands

    def wait(self, timeout_s: float) -> None:
        """Until something was asked since the last `take`. With `changed` held."""
        self.changed.wait_for(lambda: self._commands or self._woken or self._stopping, timeout_s)
