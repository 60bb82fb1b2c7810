"""Experiment: one claim about prefill and decode, its thresholds, and how it is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from legato.bench.experiments.finding import Outcome
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget


class CannotMeasureError(Exception):
    """The claim cannot be tried with this model, on this machine, or in this time; says why."""


class Experiment(ABC):
    """`criteria` are printed before anything is measured; the outcome has a check for each."""

    number: ClassVar[int]
    name: ClassVar[str]
    claim: ClassVar[str]
    criteria: ClassVar[tuple[str, ...]]
    weight: ClassVar[float] = 1.0  # its share of the time

    @abstractmethod
    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Raises CannotMeasureError."""
