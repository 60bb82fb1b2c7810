"""Counters: how the requests of a router ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.metrics.outcome import outcome_of

if TYPE_CHECKING:
    from legato.cluster.errors import RequestError


@dataclass
class Counters:
    """Requests since the start, by how they ended."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    moved: int = 0
    moved_with_kv: int = 0  # answers, from workers that drained

    def count_error(self, error: RequestError) -> None:
        """As `outcome_of` judges it."""
        outcome = outcome_of(error)
        setattr(self, outcome, getattr(self, outcome) + 1)
