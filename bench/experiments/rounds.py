"""Rounds: what the same measurement gave in turn, and whether it is on one side of a limit."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.experiments.finding import Answer, Check

if TYPE_CHECKING:
    from collections.abc import Sequence


LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Rounds:
    """One value a round. `low` and `high` bound the middle half of them."""

    values: tuple[float, ...]

    @classmethod
    def ratios(cls, values: Sequence[float], others: Sequence[float]) -> Rounds:
        """Of what was measured in the same round: a slow minute of the machine hits both."""
        return cls(tuple(a / b for a, b in zip(values, others, strict=True) if b > 0))

    @property
    def median(self) -> float:
        """Raises StatisticsError where there is no value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartile(0)

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartile(2)

    def at_least(self, limit: float) -> Answer:
        """Unclear where the limit lies within the middle half of the rounds, or where they are too
        few to tell what is noise.
        """
        if len(self.values) < LEAST_ROUNDS:
            return Answer.UNCLEAR
        if self.low >= limit:
            return Answer.YES
        return Answer.NO if self.high < limit else Answer.UNCLEAR

    def at_most(self, limit: float) -> Answer:
        """As `at_least`."""
        if len(self.values) < LEAST_ROUNDS:
            return Answer.UNCLEAR
        if self.high <= limit:
            return Answer.YES
        return Answer.NO if self.low > limit else Answer.UNCLEAR

    def within(self, least: float, most: float) -> Answer:
        """Both."""
        return all_of([self.at_least(least), self.at_most(most)])

    def words(self, unit: str = "", factor: float = 1.0) -> str:
        """The median, and the middle half where there are several."""
        if not self.values:
            return "nothing"
        unit = f" {unit}" if unit else ""
        median = f"{number(self.median * factor)}{unit}"
        if len(self.values) == 1:
            return f"{median} (one round)"
        low, high = number(self.low * factor), number(self.high * factor)
        return f"{median} (middle half of {len(self.values)} rounds: {low} to {high})"

    def _quartile(self, index: int) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return statistics.quantiles(self.values, n=4, method="inclusive")[index]


def number(value: float) -> str:
    """Three digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = next(n for n in range(1, 12) if abs(value) >= 10 ** (2 - n))
    return f"{value:.{digits}f}"


def all_of(answers: Sequence[Answer]) -> Answer:
    """Yes where all are; no where one is; unclear where there is none at all."""
    for answer in (Answer.NO, Answer.UNCLEAR, Answer.YES):
        if answer in answers:
            return answer
    return Answer.UNCLEAR


def rounds_words(count: int) -> str:
    """1 round, 2 rounds."""
    return f"{count} round{'s' * (count != 1)}"


def check_at_least(statement: str, rounds: Rounds, limit: float) -> Check:
    """A check of a ratio; the statement names the limit."""
    return Check(statement, rounds.words(), rounds.at_least(limit))


def check_at_most(statement: str, rounds: Rounds, limit: float) -> Check:
    """As `check_at_least`."""
    return Check(statement, rounds.words(), rounds.at_most(limit))
