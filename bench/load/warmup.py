"""Warmup: the beginning of a load, which is in no figure; and Span, where it ends and the rest."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.bench.load.workload import LoadWorkload

MAX_WARMUP_REQUESTS = 1_000_000
MAX_WARMUP_S = 1e6


@dataclass(frozen=True)
class Warmup:
    """The first `num_requests`, or those that are due in the first `seconds`. They are of the load
    itself: what is measured behind them comes upon a service that is as busy as it will be.
    """

    num_requests: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.num_requests <= MAX_WARMUP_REQUESTS:
            raise ValueError(
                f"a warm-up must have [0, {MAX_WARMUP_REQUESTS:,}] requests, got "
                f"{self.num_requests}"
            )
        if not 0 <= self.seconds <= MAX_WARMUP_S:
            raise ValueError(
                f"a warm-up must take [0, {MAX_WARMUP_S:,.0f}] seconds, got {self.seconds:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Warmup:
        """Reads `20`, requests, or `10s`.

        Raises:
            ValueError: it is neither, or out of range.
        """
        if found := re.fullmatch(r"([0-9]{1,9})", text.strip()):
            return cls(num_requests=int(found[1]))
        if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)s", text.strip()):
            return cls(seconds=float(found[1]))
        raise ValueError(f"must be requests, such as 20, or seconds, such as 10s, got {text!r}")

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds else str(self.num_requests)

    def covers(self, number: int, since_s: float) -> bool:
        """The request with this number, from 0, that is due so long after the load's begin."""
        return number < self.num_requests or since_s < self.seconds


NO_WARMUP = Warmup()


class Place(enum.Enum):
    """Of one request in its load."""

    WARM_UP = enum.auto()
    COUNTED = enum.auto()
    OVER = enum.auto()  # it is sent no more


class Span:
    """Places the requests of one run, in the order in which they are due."""

    def __init__(self, workload: LoadWorkload) -> None:
        self._workload = workload
        self._num_counted = 0
        self._counted_from_s: float | None = None

    def place(self, number: int, since_s: float) -> Place:
        """Number and duration are those of what counts: the warm-up comes on top. `since_s`: since
        the load's begin.
        """
        workload = self._workload
        if workload.warmup.covers(number, since_s):
            return Place.WARM_UP
        if self._counted_from_s is None:
            by_clock = workload.is_open and not workload.warmup.num_requests
            self._counted_from_s = workload.warmup.seconds if by_clock else since_s
        duration_s, limit = workload.duration_s, workload.num_requests
        if duration_s is not None and since_s - self._counted_from_s >= duration_s:
            return Place.OVER
        if limit is not None and self._num_counted >= limit:
            return Place.OVER
        self._num_counted += 1
        return Place.COUNTED
