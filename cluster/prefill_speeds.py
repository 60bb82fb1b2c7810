"""PrefillSpeeds: how many prompt tokens a second each prefill worker computes while it has more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.decaying_mean import DecayingMean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from legato.protos import common_pb2

NEWEST_WEIGHT = 0.1  # of one report's; they come up to 20 times a second
FORGET_S = 60.0


class PrefillSpeeds:
    """By the workers' own counters, so that prompts computed in one batch count together. With few
    and short prompts it is less than the worker could do: a part of a report's time it was idle.

    `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._means: dict[str, DecayingMean] = {}
        self._last: dict[str, tuple[float, int]] = {}  # of a worker that had prompts

    def note_report(
        self, worker_id: str, load: common_pb2.WorkerLoad, *, has_prompts: bool
    ) -> None:
        """The time between two reports counts where the worker had prompts at the first one, by the
        router's books. What was computed then is in it, whether or not more are there at the end.
        """
        now, last = self._now(), self._last.pop(worker_id, None)
        if has_prompts:
            self._last[worker_id] = now, load.prefill_tokens
        if last is not None and now > last[0] and load.prefill_tokens >= last[1]:
            mean = self._means.setdefault(worker_id, DecayingMean(NEWEST_WEIGHT, FORGET_S))
            mean.add(load.prefill_tokens - last[1], now - last[0], now)

    def forget(self, worker_id: str) -> None:
        """The worker has gone."""
        self._means.pop(worker_id, None)
        self._last.pop(worker_id, None)

    def tokens_s(self, worker_id: str) -> float | None:
        """Of one worker; None: not measured of late."""
        mean = self._means.get(worker_id)
        return (mean.value(self._now()) or None) if mean is not None else None

    def pool_tokens_s(self, worker_ids: Collection[str]) -> float | None:
        """Of all of them; one that was not measured counts as the mean of the others."""
        known = [speed for w in worker_ids if (speed := self.tokens_s(w)) is not None]
        return sum(known) / len(known) * len(worker_ids) if known else None
