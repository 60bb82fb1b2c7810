"""Slo: what users are promised, and which share of them must have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.bench.load.sample import Sample


@dataclass(frozen=True)
class Slo:
    """A request is good that has its first token within `ttft_s` of when it was due, and then on
    average one each `itl_s`; None: however long it takes. The targets are met where `percentile`
    percent of the requests are good.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    percentile: float = 99.0

    @property
    def is_set(self) -> bool:
        """Whether anything is promised."""
        return self.ttft_s is not None or self.itl_s is not None

    def is_met(self, sample: Sample) -> bool:
        """Those that failed never do."""
        if not sample.ok:
            return False
        token_s = sample.token_mean_s or 0.0
        return (self.ttft_s is None or sample.ttft_s <= self.ttft_s) and (
            self.itl_s is None or token_s <= self.itl_s
        )
