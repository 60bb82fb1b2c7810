"""IdleConnections: those of the HTTP endpoint that serve no request, and when they are ended."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.server import Protocols

# A connection that has not sent the whole head of a request for so long.
HEAD_TIMEOUT_S = 10.0
# Of the files that this process may open; each connection is one, and so are those of gRPC.
IDLE_SHARE = 0.25


def most_idle() -> int:
    """How many may be open and idle."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(IDLE_SHARE * soft)


class IdleConnections:
    """Told once in a while of the open ones, which it does not own."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._since: dict[Protocols, tuple[float, bool]] = {}  # when it was first seen so, silent

    def to_end(self, connections: set[Protocols]) -> list[Protocols]:
        """Those without a request's head for too long, and the longest idle ones beyond the bound:
        a client that connects again is served, one that finds no place is not.
        """
        now_s = self._now()
        before, self._since = self._since, {}
        for connection in filter(_is_idle, connections):
            silent = _is_silent(connection)
            since_s, was_silent = before.get(connection, (now_s, silent))
            self._since[connection] = (since_s if silent == was_silent else now_s), silent
        oldest = sorted(self._since, key=lambda connection: self._since[connection][0])
        ended = oldest[: max(0, len(oldest) - self._most)]
        for connection in oldest[len(ended) :]:
            since_s, silent = self._since[connection]
            if silent and now_s - since_s >= HEAD_TIMEOUT_S:
                ended.append(connection)
        for connection in ended:
            del self._since[connection]
        return ended


def _is_idle(connection: Protocols) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is None or cycle.response_complete


def _is_silent(connection: Protocols) -> bool:
    """It is idle and has begun a request, or none yet: between requests uvicorn has a timer for
    it, which its first byte ends.
    """
    return _is_idle(connection) and getattr(connection, "timeout_keep_alive_task", None) is None
