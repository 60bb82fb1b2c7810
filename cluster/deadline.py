"""Deadline: when a request ends at the latest, and who says so."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """`at` is on the clock of the router's queue, in seconds."""

    at: float = math.inf
    given: bool = False  # by the client; else it is the service's own

    @property
    def name(self) -> str:
        """In words, for who is told that it has passed or cannot be met."""
        return "the call's deadline" if self.given else "the service's default deadline"


NO_DEADLINE = Deadline()
