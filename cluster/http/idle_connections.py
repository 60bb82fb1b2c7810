"""IdleConnections: those of the HTTP endpoint that serve no request, and when they are ended."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from legato.cluster.open_files import share_of_open_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.server import Protocols

# A connection that has not sent the whole head of a request for so long.
HEAD_TIMEOUT_S = 10.0
# Of the files that this process may open; each connection is one, and so are those of gRPC.
IDLE_SHARE = 0.25
# Each look at all of them takes time, which a flood of new ones must not multiply.
LOOK_PERIOD_S = 0.05


def most_idle() -> int:
    """How many may be open and idle."""
    return share_of_open_files(IDLE_SHARE)


class _Idle(NamedTuple):
    since_s: float  # when it was first seen so
    silent: bool
    cycle: object  # of the request before; another one means that it has been served meanwhile


class IdleConnections:
    """Told once in a while of the open ones, which it does not own."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._idle: dict[Protocols, _Idle] = {}
        self._oldest: deque[Protocols] = deque()  # as far as they are known; some may have gone
        self._next_look_s = 0.0

    def opened(self, connection: Protocols) -> None:
        """It is idle from now on, and not from when somebody looks."""
        self._idle[connection] = _Idle(self._now(), _is_silent(connection), _cycle(connection))
        self._oldest.append(connection)

    def to_end(self, connections: set[Protocols]) -> list[Protocols]:
        """Those without a request's head for too long, and the longest idle ones beyond the bound:
        a client that connects again is served, one that finds no place is not.
        """
        oldest = self._look(connections)
        now_s = self._now()
        ended = oldest[: max(0, len(oldest) - self._most)]
        for connection in oldest[len(ended) :]:
            idle = self._idle[connection]
            if idle.silent and now_s - idle.since_s >= HEAD_TIMEOUT_S:
                ended.append(connection)
        return self._forget(ended)

    def for_room(self, connections: set[Protocols]) -> list[Protocols]:
        """The longest idle one, to make room for a new one; none where all have requests."""
        ended = self._pop(connections)
        now_s = self._now()
        if not ended and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_PERIOD_S
            self._look(connections)
            ended = self._pop(connections)
        return self._forget(ended)

    def _pop(self, connections: set[Protocols]) -> list[Protocols]:
        while self._oldest:
            connection = self._oldest.popleft()
            if connection not in connections or not _is_idle(connection):
                continue
            known = self._idle.get(connection)
            if known is None or known.cycle is _cycle(connection):
                return [connection]
            # It has been served since: it is idle for less long than it seemed.
            self.opened(connection)
        return []

    def _look(self, connections: set[Protocols]) -> list[Protocols]:
        """All that are idle, the longest idle first."""
        now_s = self._now()
        before, self._idle = self._idle, {}
        for connection in filter(_is_idle, connections):
            seen = _Idle(now_s, _is_silent(connection), _cycle(connection))
            known = before.get(connection, seen)
            is_same = known.silent == seen.silent and known.cycle is seen.cycle
            self._idle[connection] = known if is_same else seen
        oldest = sorted(self._idle, key=lambda connection: self._idle[connection].since_s)
        self._oldest = deque(oldest)
        return oldest

    def _forget(self, ended: list[Protocols]) -> list[Protocols]:
        for connection in ended:
            self._idle.pop(connection, None)
        return ended


def _cycle(connection: Protocols) -> object:
    return getattr(connection, "cycle", None)


def _is_idle(connection: Protocols) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is None or cycle.response_complete


def _is_silent(connection: Protocols) -> bool:
    """It is idle and has begun a request, or none yet: between requests uvicorn has a timer for
    it, which its first byte ends.
    """
    return _is_idle(connection) and getattr(connection, "timeout_keep_alive_task", None) is None
