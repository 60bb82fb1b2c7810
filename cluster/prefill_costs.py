"""PrefillCostBook: running means of what the remote way to an answer's first step costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.policies import PrefillCosts

if TYPE_CHECKING:
    from collections.abc import Callable

NEWEST_WEIGHT = 0.2  # of each new value in the mean: what came ten before counts a tenth
# A mean that nothing was added to for so long says nothing: the next prompt goes the remote way and
# measures it anew. Else a slow moment could send all short prompts the local way for ever.
FORGET_S = 30.0


class PrefillCostBook:
    """Of one router. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._overhead_s: float | None = None
        self._overhead_at = 0.0
        self._model_s = 0.0  # both weigh the newest prompts most; their ratio is the mean
        self._model_tokens = 0.0

    def note_prefill(self, model_s: float, num_computed: int) -> None:
        """A prefill worker computed so many tokens of a prompt."""
        keep = 1.0 - NEWEST_WEIGHT
        self._model_s = keep * self._model_s + NEWEST_WEIGHT * model_s
        self._model_tokens = keep * self._model_tokens + NEWEST_WEIGHT * num_computed

    def note_overhead(self, seconds: float) -> None:
        """From a ticket to the batch, without the prompt's wait at the prefill worker and without
        the model.
        """
        now = self._now()
        if self._overhead_s is None or now - self._overhead_at > FORGET_S:
            self._overhead_s = seconds
        else:
            self._overhead_s += NEWEST_WEIGHT * (seconds - self._overhead_s)
        self._overhead_at = now

    def costs(self, local_token_s: float) -> PrefillCosts:
        """`local_token_s`: as the decode worker reports it, 0 where it does not know."""
        fresh = self._now() - self._overhead_at <= FORGET_S
        return PrefillCosts(
            remote_overhead_s=self._overhead_s if fresh else None,
            remote_token_s=self._model_s / self._model_tokens if self._model_tokens else None,
            local_token_s=local_token_s or None,
        )
