"""PrefillSpeeds: how many prompt tokens a second each prefill worker computes while it has more."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.protos import common_pb2

# Of busy time: what was so long ago counts 1/e. By time and not by reports, for a long step is many
# reports without a token, and then all of them at once.
TIME_CONSTANT_S = 10.0
FORGET_S = 60.0
LEAST_S = 0.2  # of busy time; less says nothing


@dataclass
class _Busy:
    """What a worker computed in its busy time, the newest weighing most."""

    tokens: float = 0.0
    seconds: float = 0.0
    at: float = 0.0


class PrefillSpeeds:
    """By the workers' own counters, so that prompts computed in one batch count together. With few
    and short prompts it is less than the worker could do: a part of a report's time it was idle.

    `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._busy: dict[str, _Busy] = {}
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
        if last is None or load.prefill_tokens < last[1]:
            return
        busy, seconds = self._busy.setdefault(worker_id, _Busy()), now - last[0]
        keep = math.exp(-seconds / TIME_CONSTANT_S) if now - busy.at <= FORGET_S else 0.0
        busy.tokens = keep * busy.tokens + load.prefill_tokens - last[1]
        busy.seconds = keep * busy.seconds + seconds
        busy.at = now

    def forget(self, worker_id: str) -> None:
        """The worker has gone."""
        self._busy.pop(worker_id, None)
        self._last.pop(worker_id, None)

    def tokens_s(self, worker_id: str) -> float | None:
        """Of one worker; None: not measured of late."""
        busy = self._busy.get(worker_id)
        if busy is None or self._now() - busy.at > FORGET_S or busy.seconds < LEAST_S:
            return None
        return busy.tokens / busy.seconds or None
