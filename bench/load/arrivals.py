"""Arrivals: how the times between the requests of an open load scatter around their mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FORMS = "poisson, gamma:CV or constant"
MIN_CV, MAX_CV = 0.01, 100.0


@dataclass(frozen=True)
class Arrivals:
    """By `cv`, the gaps' deviation over their mean: 0 is a clock, 1 a Poisson process (of users
    who know nothing of each other), and above come bursts with pauses between them.
    """

    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.cv and not MIN_CV <= self.cv <= MAX_CV:
            raise ValueError(
                f"the CV of arrivals must be in [{MIN_CV:g}, {MAX_CV:g}], got {self.cv:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Reads one of FORMS.

        Raises:
            ValueError: it is none, or out of range.
        """
        word = text.strip()
        if word in ("poisson", "constant"):
            return cls(1.0 if word == "poisson" else 0.0)
        if found := re.fullmatch(r"gamma:([0-9]{1,6}(?:\.[0-9]{1,6})?)", word):
            cv = float(found[1])
            if not MIN_CV <= cv <= MAX_CV:
                raise ValueError(f"CV must be in [{MIN_CV:g}, {MAX_CV:g}], got {cv:g}")
            return cls(cv)
        raise ValueError(f"must be {FORMS}, got {text!r}")

    def __str__(self) -> str:
        return {0.0: "constant", 1.0: "poisson"}.get(self.cv, f"gamma:{self.cv:g}")

    def gap_s(self, draw: random.Random, rate_per_s: float) -> float:
        """Until the next request."""
        if not self.cv:
            return 1 / rate_per_s
        if self.cv == 1:
            return draw.expovariate(rate_per_s)
        shape = 1 / self.cv**2
        return draw.gammavariate(shape, 1 / (shape * rate_per_s))


POISSON = Arrivals()
