"""Targets: what users are to feel."""

from __future__ import annotations

from dataclasses import dataclass

MIN_PERCENT, MAX_PERCENT = 50.0, 99.0  # beyond, the tails of the closed forms are a guess


@dataclass(frozen=True)
class Targets:
    """`percent` of first tokens within `ttft_s`; of gaps between tokens within `itl_s`."""

    ttft_s: float
    itl_s: float
    percent: float = 99.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be above 0 s, got {getattr(self, name)}")
        if not MIN_PERCENT <= self.percent <= MAX_PERCENT:
            raise ValueError(
                f"the percentile must be in [{MIN_PERCENT:g}, {MAX_PERCENT:g}], got "
                f"{self.percent:g}"
            )
