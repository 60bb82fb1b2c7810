"""Verdict: whether the targets are met, or why that cannot be said."""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.load.sample import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample
    from legato.bench.load.slo import Slo
    from legato.bench.load.window import Window

MIN_WINDOW_S = 10.0
MIN_ANSWERS = 2  # of the usual length, one after the other: else most straddle the window


class Doubt(enum.Enum):
    """Why there is no verdict."""

    INTERRUPTED = "interrupted"
    FAILED = "failed"
    NOTHING = "nothing"
    SHORT = "window too short"


@dataclass(frozen=True)
class Reason:
    """One doubt, in words, and what to do."""

    doubt: Doubt
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """`met`: None where it is refused, or nothing was promised."""

    met: bool | None
    reasons: tuple[Reason, ...] = ()
    text: str = ""

    def as_json(self) -> dict[str, object]:
        """With the sentence that people read."""
        return {
            "given": not self.reasons,
            "met": self.met,
            "text": self.text,
            "refused_because": [
                {"doubt": r.doubt.value, "what": r.what, "remedy": r.remedy} for r in self.reasons
            ],
        }


def judge(
    samples: Sequence[Sample],
    window: Window | None,
    slo: Slo,
    min_window_s: float = MIN_WINDOW_S,
) -> Verdict:
    """Of the samples that count."""
    if reasons := tuple(_reasons(samples, window, min_window_s)):
        text = "no verdict: " + "; ".join(str(reason) for reason in reasons)
        return Verdict(None, reasons, text)
    if not slo.is_set:
        return Verdict(None, text="the figures stand; no targets were given")
    share = sum(slo.is_met(sample) for sample in samples) / len(samples)
    met = 100 * share >= slo.percentile
    return Verdict(
        met,
        text=f"the targets are {'met' if met else 'missed'}: {100 * share:.1f} % of "
        f"{len(samples)} requests were good, of {slo.percentile:g} % that must be",
    )


def _reasons(samples: Sequence[Sample], window: Window | None, min_window_s: float) -> list[Reason]:
    reasons = []
    unfinished = sum(sample.code == UNFINISHED for sample in samples)
    failed = sum(not sample.ok for sample in samples) - unfinished
    good = [sample for sample in samples if sample.ok]
    if unfinished:
        reasons.append(
            Reason(
                Doubt.INTERRUPTED,
                f"{unfinished} requests were cut when the load was interrupted",
                "let it end by itself",
            )
        )
    if failed:
        reasons.append(
            Reason(
                Doubt.FAILED,
                f"{failed} of {len(samples)} requests failed",
                "see to the errors, or ask for less",
            )
        )
    if not good:
        reasons.append(Reason(Doubt.NOTHING, "no request that counts was answered", "send more"))
        return reasons
    least_s = max(min_window_s, MIN_ANSWERS * statistics.median(s.e2e_s for s in good))
    seconds = 0.0 if window is None else window.seconds
    if seconds < least_s:
        reasons.append(
            Reason(
                Doubt.SHORT,
                f"all of the load was there for {seconds:.1f} s, limit {least_s:.1f} s"
                + (
                    f" ({MIN_ANSWERS} answers of the usual length)"
                    if least_s > min_window_s
                    else " (--min-window)"
                ),
                "a longer --duration, or more --num-requests",
            )
        )
    return reasons
