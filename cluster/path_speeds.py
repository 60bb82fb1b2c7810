"""PathSpeeds: how many rows of KV a second get from one worker to another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.decaying_mean import DecayingMean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from legato.cluster.path_policies import Path
    from legato.protos import worker_pb2

NEWEST_WEIGHT = 0.2
FORGET_S = 300.0
# A smaller hand-off is all latency.
LEAST_BYTES = 64 * 1024
# Rows leave while others are computed, so that often little is left to send when prefill is done.
LEAST_SHARE = 0.1  # of the whole transfer's time


class PathSpeeds:
    """In rows, for a row has as many bytes on every path of a service.

    `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._means: dict[Path, DecayingMean] = {}

    def note(
        self, path: Path, done: worker_pb2.HandoffDone, prompt_tokens: int, model_s: float
    ) -> None:
        """A hand-off is done. It began with prefill, whose `model_s` is no time of the path."""
        num_rows = prompt_tokens - done.reused_tokens
        if num_rows < 1 or done.kv_bytes < LEAST_BYTES or done.transfer_s <= 0.0:
            return
        seconds = max(LEAST_SHARE * done.transfer_s, done.transfer_s - model_s)
        mean = self._means.setdefault(path, DecayingMean(NEWEST_WEIGHT, FORGET_S))
        mean.add(num_rows, seconds, self._now())

    def forget(self, worker_id: str) -> None:
        """The worker has gone."""
        self._means = {p: m for p, m in self._means.items() if worker_id not in p}

    def rows_s(self) -> Mapping[Path, float]:
        """Of every path that was used of late."""
        now = self._now()
        speeds = ((path, mean.value(now)) for path, mean in self._means.items())
        return {path: speed for path, speed in speeds if speed}
