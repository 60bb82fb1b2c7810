"""Launcher: what the controller asks of whoever starts workers, and what a worker answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


@dataclass(frozen=True)
class StartedWorker:
    """What a worker says of itself once it serves."""

    worker_id: str
    address: str
    pid: int
    host: str


class Launcher(Protocol):
    """Begins what is asked and returns at once; outcomes come back as the controller's events."""

    def start(self, name: str, role: Role) -> None:
        """Leads to `on_ready` or `on_dead`, and to `on_dead` whenever the process ends."""
        ...

    def adopt(self, name: str, role: Role) -> None:
        """A worker that an earlier controller started: leads to what `start` leads to."""
        ...

    def drain(self, name: str, timeout_s: float) -> None:
        """No new work; running work has `timeout_s`. Leads to `on_drained`."""
        ...

    def kill(self, name: str) -> None:
        """Ends the process, whatever it does."""
        ...

    def retire(self, name: str, timeout_s: float) -> None:
        """As `drain`, of one that goes on in another role: its server stays until `rebuild`, for
        a router that does not hear a worker on its list reports it lost.
        """
        ...

    def rebuild(self, name: str, new_name: str, role: Role) -> None:
        """The retired worker `name` goes on as `new_name` in another role, with the weights that it
        has. Leads to what `start` leads to; `name` is no more.
        """
        ...

    def obstacle(self, before: Role, after: Role) -> str:
        """Why no worker of the one role can go on in the other, or nothing."""
        ...

    def waiting_for(self, name: str) -> str:
        """What the start of this worker waits for, such as a GPU or its weights, or nothing."""
        ...

    def lacks_room(self, name: str) -> bool:
        """Whether its start waits for a node with room: it has not begun, and may not time out."""
        ...
