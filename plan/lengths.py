"""Lengths: a distribution of numbers of tokens as a word: 512, 100..900, lognormal:512:1:4096."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

MAX_TOKENS = 2**31 - 1
FORMS = "512, 100..900 or lognormal:MEDIAN:SIGMA:MAX"
MAX_SIGMA = 4.0
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """From `least` to `most`; uniform, or lognormal where there is a `sigma`."""

    least: int
    most: int
    median: float = 0.0
    sigma: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_TOKENS:
            raise ValueError(
                f"a number of tokens must be in [1, {MAX_TOKENS}], from the least to the most, "
                f"got {self.least}..{self.most}"
            )
        if self.sigma is not None:
            if not 0 < self.sigma <= MAX_SIGMA:
                raise ValueError(f"sigma must be in (0, {MAX_SIGMA:g}], got {self.sigma:g}")
            if not 1 <= self.median <= self.most:
                raise ValueError(
                    f"the median must be in [1, {self.most}]: from one token to the most, got "
                    f"{self.median:g}"
                )

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads one of FORMS.

        Raises:
            ValueError: it is none, or out of range.
        """
        words = text.strip()
        if found := re.fullmatch(r"([0-9]{1,10})(?:\.\.([0-9]{1,10}))?", words):
            return cls(int(found[1]), int(found[2] or found[1]))
        number = r"([0-9]{1,10}(?:\.[0-9]{1,6})?)"
        if found := re.fullmatch(rf"lognormal:{number}:{number}:([0-9]{{1,10}})", words):
            return cls(1, int(found[3]), float(found[1]), float(found[2]))
        raise ValueError(f"must be {FORMS}, got {text!r}")

    def __str__(self) -> str:
        """In the form that `parse` reads."""
        if self.sigma is not None:
            return f"lognormal:{self.median:g}:{self.sigma:g}:{self.most}"
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"

    def quantile(self, share: float) -> int:
        """So many tokens that `share` in (0, 1) of the requests has at most as many."""
        assert 0 <= share <= 1
        if self.sigma is None:
            return min(self.most, self.least + math.floor(share * (self.most - self.least + 1)))
        share = min(max(share, 1e-12), 1 - 1e-12)
        exact = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share))
        return max(self.least, min(self.most, round(exact)))
