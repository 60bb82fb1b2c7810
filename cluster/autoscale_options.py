"""AutoscaleOptions: between which sizes the pools may move, towards what, and how fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.pool import MAX_POOL_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from legato.cluster.control_plane import Role

MAX_DURATION_S = 86_400.0
_RANGE = re.compile(r"(\w{1,32})=(\d{1,18})(?:\.\.(\d{1,18}))?", re.ASCII)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|m)", re.ASCII)
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True)
class PoolRange:
    """Least and greatest number of workers of a pool; raises ValueError where they are none."""

    min_workers: int
    max_workers: int

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise ValueError(f"must be at least 1 worker, got {self}")
        if self.max_workers < self.min_workers:
            raise ValueError(f"the least must come first, got {self}")
        if self.max_workers > MAX_POOL_SIZE:
            raise ValueError(f"must be at most {MAX_POOL_SIZE} workers, got {self}")

    def __str__(self) -> str:
        return f"{self.min_workers}..{self.max_workers}"

    def __contains__(self, size: int) -> bool:
        return self.min_workers <= size <= self.max_workers

    def clamp(self, size: int) -> int:
        """The nearest size within."""
        return min(max(size, self.min_workers), self.max_workers)


@dataclass(frozen=True)
class AutoscaleOptions:
    """Times in seconds; raises ValueError naming the field, its value and the limit."""

    prefill: PoolRange
    decode: PoolRange
    ttft_slo_s: float = 0.5
    itl_slo_s: float = 0.05
    # A need for more must have held this long: a burst that the pool digests starts nobody.
    up_after_s: float = 3.0
    # Less must have been enough this long: a worker costs a start to have back, an idle one little.
    down_after_s: float = 60.0
    # Between two changes of a pool, counted from when the first is done and its workers serve:
    # what they change must show in the figures first.
    cool_down_s: float = 15.0
    dry_run: bool = False  # decide, tell, and change nothing

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "itl_slo_s", "up_after_s", "down_after_s", "cool_down_s"):
            value = getattr(self, name)
            if not 0 < value <= MAX_DURATION_S:
                raise ValueError(f"{name} must be in (0, {MAX_DURATION_S:g}], got {value:g}")

    def range_of(self, role: Role) -> PoolRange:
        """Of one pool."""
        return self.prefill if role == "prefill" else self.decode

    def check_targets(self, targets: Mapping[Role, int]) -> None:
        """What an operator asks by hand. In a dry run the pools are the operator's alone.

        Raises:
            ValueError: naming the pool, the size and the range.
        """
        for role, size in targets.items():
            allowed = self.range_of(role)
            if size not in allowed and not self.dry_run:
                raise ValueError(
                    f"{role} is {size}, limit [{allowed.min_workers}, {allowed.max_workers}]: the "
                    f"{role} pool is autoscaled (--autoscale {role}={allowed})"
                )


def parse_ranges(words: Iterable[str]) -> dict[Role, PoolRange]:
    """Both pools' ranges from `prefill=1..8` and `decode=2`, which is `decode=2..2`, in any order.

    Raises:
        ValueError: naming the word and what is wrong with it, or the pool that is missing.
    """
    ranges: dict[str, PoolRange] = {}
    for word in words:
        match = _RANGE.fullmatch(word.strip())
        pool = word.strip().partition("=")[0]
        if match is None and pool in ("prefill", "decode"):
            raise ValueError(
                f"{pool} must be MIN..MAX with 1 <= MIN <= MAX <= {MAX_POOL_SIZE}, got {word!r}"
            )
        if match is None or pool not in ("prefill", "decode"):
            raise ValueError(
                f"takes two words, prefill=MIN..MAX and decode=MIN..MAX, and one is {word!r}"
            )
        if match[1] in ranges:
            raise ValueError(f"{match[1]} is given twice")
        try:
            ranges[match[1]] = PoolRange(int(match[2]), int(match[3] or match[2]))
        except ValueError as error:
            raise ValueError(f"{match[1]}: {error}") from None
    for pool in ("prefill", "decode"):
        if pool not in ranges:
            raise ValueError(f"takes two words, and {pool}=MIN..MAX is missing")
    return {"prefill": ranges["prefill"], "decode": ranges["decode"]}


def parse_duration(text: str) -> float:
    """Seconds from `500ms`, `0.5s` or `2m`.

    Raises:
        ValueError: naming the text and what would do.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a duration such as 500ms, 0.5s or 2m, got {text!r}")
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError(f"must be above 0 and at most {MAX_DURATION_S:g}s, got {text}")
    return seconds


def duration_text(seconds: float) -> str:
    """For people, with two or three digits that mean something: 4.2 ms, 500 ms, 1.7 s."""
    if not seconds:
        return "0 ms"
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
