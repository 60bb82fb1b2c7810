"""DecayingMean: a mean, or a ratio of sums, in which the newest values weigh most."""

from __future__ import annotations


class DecayingMean:
    """Each new value has `newest_weight`; after `forget_s` without one nothing is known any more.

    The clock is the caller's, in seconds.
    """

    def __init__(self, newest_weight: float, forget_s: float) -> None:
        self._newest_weight, self._forget_s = newest_weight, forget_s
        self._sum = self._weight = 0.0
        self._at = float("-inf")

    def add(self, value: float, weight: float, now: float) -> None:
        """`value` for `weight` things, as seconds for tokens; weight 1.0 for a plain mean."""
        if now - self._at > self._forget_s:
            self._sum = self._weight = 0.0
        new = self._newest_weight if self._weight else 1.0
        self._sum += new * (value - self._sum)
        self._weight += new * (weight - self._weight)
        self._at = now

    def value(self, now: float) -> float | None:
        """For one thing; None: not known, or not of late."""
        fresh = self._weight and now - self._at <= self._forget_s
        return self._sum / self._weight if fresh else None
