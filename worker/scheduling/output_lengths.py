"""OutputLengths: how long answers have been of late, and so how long the next ones may get."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque

# Before anything is known. The strict rule would take max_tokens, which clients set high "to be
# safe" and seldom use; most answers of chat models are shorter than this.
PRIOR_TOKENS = 256
# So many imaginary answers of that length stand in the record at first, one leaving with each
# real one: the first few to end are the short ones, and must not pass for all.
_NUM_PRIOR = 32


class OutputLengths:
    """The lengths of the last `window` answers that ended by themselves, sorted.

    An answer that was cut off by `max_tokens` counts with that length; one that was cancelled does
    not count. A look-up costs O(log window), a record one move of at most `window` numbers.
    """

    def __init__(self, window: int = 512, prior_tokens: int = PRIOR_TOKENS) -> None:
        for name, value in (("window", window), ("prior_tokens", prior_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._recent = deque([prior_tokens] * min(_NUM_PRIOR, window))
        self._sorted = list(self._recent)
        self._num_prior = len(self._recent)
        self._window = window

    def record(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        if self._num_prior > 0 or len(self._recent) == self._window:
            self._sorted.pop(bisect_right(self._sorted, self._recent.popleft()) - 1)
            self._num_prior = max(0, self._num_prior - 1)
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected(self, max_tokens: int, emitted: int, quantile: float) -> int:
        """Tokens in all of an answer that may have `max_tokens` and has `emitted` so far.

        The quantile of those lengths of the record that are greater than `emitted`. Where it has
        none, half as much again as was emitted: what has gone on for long will go on for long.
        At least emitted + 1 and at most `max_tokens`, or `emitted` where that is `max_tokens`.
        """
        first = bisect_right(self._sorted, emitted)
        num_longer = len(self._sorted) - first
        if num_longer:
            place = max(0, math.ceil(quantile * num_longer) - 1)
            length = self._sorted[first + place]
        else:
            length = emitted + emitted // 2 + 1
        return min(length, max_tokens)
