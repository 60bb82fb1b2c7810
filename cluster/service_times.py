"""ServiceTimes: how long answers take once they have left the queue, and how long they get."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.decaying_mean import DecayingMean

if TYPE_CHECKING:
    from collections.abc import Callable

NEWEST_WEIGHT = 0.1  # of each new value in a mean
NEWEST_STEP_WEIGHT = 0.01  # of tokens, which come by the step
# What nothing was added to for so long says nothing: the next requests are let in, and measure it
# anew. Else a slow moment could refuse short deadlines for ever.
FORGET_S = 10.0


class ServiceTimes:
    """Of one router. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start_s, self._output_tokens, self._share = (
            DecayingMean(NEWEST_WEIGHT, FORGET_S) for _ in range(3)
        )
        self._token_s = DecayingMean(NEWEST_STEP_WEIGHT, FORGET_S)

    def note_start(self, seconds: float) -> None:
        """From the queue's end to the first token."""
        self._start_s.add(seconds, 1.0, self._now())

    def note_output(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of one answer came in that time, without what its client took to read.
        Of answers that are generated together: each one's tokens, and the time times their number.
        """
        if num_tokens:
            self._token_s.add(seconds, num_tokens, self._now())

    def note_length(self, num_tokens: int, max_tokens: int) -> None:
        """An answer came to its end."""
        now = self._now()
        self._output_tokens.add(num_tokens, 1.0, now)
        self._share.add(num_tokens, max_tokens, now)

    @property
    def start_s(self) -> float | None:
        """Mean seconds to the first token."""
        return self._start_s.value(self._now())

    @property
    def output_token_s(self) -> float | None:
        """Mean seconds between two tokens of one answer."""
        return self._token_s.value(self._now())

    def expected_output(self, max_tokens: int) -> int:
        """Tokens that an answer will have: as those before, but never more than it may have.

        The mean length, or the mean share of `max_tokens`, whichever is more: clients that ask for
        exactly what they use and such that ask for all there is are both met. All of `max_tokens`
        where nothing is known.
        """
        now = self._now()
        mean, share = self._output_tokens.value(now), self._share.value(now)
        if mean is None or share is None:
            return max_tokens
        return max(1, min(max_tokens, round(max(mean, share * max_tokens))))
