"""WORKLOADS: the loads by which plans are checked; none of them is what a profile measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.load.workload import LoadWorkload
from legato.plan.lengths import Lengths
from legato.plan.prediction import Predictor
from legato.plan.targets import Targets
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from legato.plan.basis import Basis
    from legato.plan.prediction import Prediction

_ANY = Targets(ttft_s=1e5, itl_s=1e5)  # what is predicted is asked, not whether it will do


@dataclass(frozen=True)
class CheckedWorkload:
    """Open: at a share of what the slower pool can serve; or closed: so many at a time."""

    prompt: str
    answer: str
    share: float | None = None
    concurrency: int | None = None

    @property
    def inputs(self) -> Lengths:
        """Tokens of prompts."""
        return Lengths.parse(self.prompt)

    @property
    def outputs(self) -> Lengths:
        """Tokens of answers."""
        return Lengths.parse(self.answer)


WORKLOADS = (
    CheckedWorkload("200..400", "32", share=0.3),
    CheckedWorkload("200..400", "32", share=0.6),
    CheckedWorkload("150..300", "64..192", share=0.3),
    CheckedWorkload("150..300", "64..192", share=0.6),
    CheckedWorkload("20..100", "16..48", share=0.3),
    CheckedWorkload("20..100", "16..48", share=0.6),
    CheckedWorkload("600..1000", "16..32", share=0.3),
    CheckedWorkload("600..1000", "16..32", share=0.6),
    CheckedWorkload("lognormal:250:0.6:900", "lognormal:60:0.6:240", share=0.4),
    CheckedWorkload("lognormal:250:0.6:900", "lognormal:60:0.6:240", share=0.7),
    CheckedWorkload("200..400", "32..96", concurrency=1),
    CheckedWorkload("200..400", "32..96", concurrency=4),
    CheckedWorkload("100..700", "64", concurrency=2),
    CheckedWorkload("100..700", "64", concurrency=8),
)


def predict(
    basis: Basis, inputs: Lengths, outputs: Lengths, share: float
) -> tuple[float, Prediction]:
    """The rate that is `share` of what the pair can serve, and what it will be like."""

    def at(rate_per_s: float) -> Prediction | None:
        traffic = Traffic.of(rate_per_s, inputs, outputs)
        made = Predictor(basis.times, traffic, basis.size, _ANY, basis.slowdown)
        return made.predict(1, 1)

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) is None else (middle, high)
    found = at(share * low)
    assert found is not None, "it is less than the pair can serve"
    return share * low, found


def load_of(
    checked: CheckedWorkload, rate_per_s: float | None, seconds: float, seed: int
) -> LoadWorkload:
    """As it is sent."""
    return LoadWorkload(
        checked.inputs,
        checked.outputs,
        rate_per_s=rate_per_s,
        concurrency=checked.concurrency,
        duration_s=seconds,
        seed=seed,
    )
