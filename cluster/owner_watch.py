"""OwnerWatch: whether the owner of a service is gone, as its controller judges it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

BEAT_PERIOD_S = 1.0
# Without a beat and without a sight of the owner's process, it is taken for gone.
SILENCE_S = 15.0


@dataclass(frozen=True)
class OwnerProcess:
    """Where the owner is. `created_s` tells it from another that got its pid."""

    node_id: str  # Ray's
    pid: int
    created_s: float


def is_running(owner: OwnerProcess) -> bool:
    """Whether this machine has that process; asked where `node_id` is our own."""
    try:
        process = psutil.Process(owner.pid)
        same = abs(process.create_time() - owner.created_s) < 1
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class OwnerWatch:
    """A process that was seen and is not there any more has ended. One that was never seen, since
    it is on another machine or in another pid namespace, is believed to live while it beats.
    """

    def __init__(self, now_s: float, *, seen: bool) -> None:
        self._seen = seen
        self._beat_at_s = now_s

    def beat(self, now_s: float) -> None:
        """The owner called."""
        self._beat_at_s = now_s

    def is_gone(self, now_s: float, *, seen: bool) -> bool:
        """`seen`: its process is there at this moment."""
        self._seen = self._seen or seen
        if seen:
            return False
        return self._seen or now_s - self._beat_at_s > SILENCE_S
