"""Resize, Flip: what the autoscaler decides, in one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


@dataclass(frozen=True)
class Resize:
    """Another target for one pool. Fewer means: the surplus drains."""

    role: Role
    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        return f"{self.role} {self.before} -> {self.after}: {self.reason}"


@dataclass(frozen=True)
class Flip:
    """A warm worker of the pool with one to spare goes to the one that needs it: no start, no load
    of weights. The targets of both move by one.
    """

    worker_id: str
    to: Role
    target: int  # of that pool, with the worker
    reason: str

    def __str__(self) -> str:
        return f"{self.to} {self.target - 1} -> {self.target} by {self.worker_id}: {self.reason}"


Decision = Resize | Flip
