"""Finding: what became of one claim: what was measured, the verdict, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.chart import BarChart, LineChart


class Answer(Enum):
    """Whether a measurement is on the side of its threshold that the claim wants."""

    YES = "yes"
    NO = "no"
    UNCLEAR = "unclear"  # not measured, or the rounds disagree


class Verdict(Enum):
    """Over all checks of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    DOES_NOT_HOLD = "does not hold"
    NOT_MEASURED = "could not be measured"


@dataclass(frozen=True)
class Check:
    """A statement with its threshold, which stood before anything was measured."""

    statement: str
    measured: str
    answer: Answer


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.head), f"{row} does not fit {self.head}"


@dataclass(frozen=True)
class Outcome:
    """What an experiment has measured."""

    checks: tuple[Check, ...]
    table: Table | None = None
    chart: LineChart | BarChart | None = None
    notes: tuple[str, ...] = ()  # why it is so, what was left out, how it was measured


@dataclass(frozen=True)
class Finding:
    """An outcome with its verdict."""

    number: int
    name: str  # of its picture's file too
    claim: str
    outcome: Outcome
    verdict: Verdict
    reason: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        table = self.outcome.table
        return {
            "number": self.number,
            "name": self.name,
            "claim": self.claim,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "checks": [asdict(c) | {"answer": c.answer.value} for c in self.outcome.checks],
            "table": None if table is None else {"head": table.head, "rows": table.rows},
            "notes": self.outcome.notes,
            "seconds": round(self.seconds, 1),
        }


def judge(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """The verdict follows from the answers alone. It holds where all are yes, and does not where
    none is and at least one is no.
    """
    by_answer = {answer: [c for c in checks if c.answer is answer] for answer in Answer}
    yes, no, unclear = (by_answer[answer] for answer in Answer)
    if not yes and not no:
        verdict = Verdict.NOT_MEASURED
    elif not no and not unclear:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.IN_PART if yes else Verdict.DOES_NOT_HOLD
    words = [f"not so: {_words(check)}" for check in no]
    words += [f"not to be told: {_words(check)}" for check in unclear]
    return verdict, "; ".join(words) or "every check is met"


def _words(check: Check) -> str:
    return f"{check.statement} (measured: {check.measured})"
