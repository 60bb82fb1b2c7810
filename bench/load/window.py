"""Window: the time in which a load was there as asked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample


@dataclass(frozen=True)
class Window:
    """On the samples' clock. A request that straddles a border is not cut: of its tokens and gaps
    those count that fall within, whenever it was sent, and its latencies count wherever it ends.
    """

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s

    def num_tokens(self, samples: Sequence[Sample]) -> int:
        """Those that came within."""
        return sum(self._has(at_s) for s in samples for at_s in s.token_times_s)

    def num_prompt_tokens(self, samples: Sequence[Sample]) -> int:
        """Of prompts whose first token came within."""
        return sum(
            s.prompt_tokens or s.planned.input_tokens
            for s in samples
            if s.token_times_s and self._has(s.token_times_s[0])
        )

    def ended(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those whose last token came within. What began before stands for what ends behind."""
        return [s for s in samples if s.ok and self._has(s.token_times_s[-1])]

    def gaps_s(self, samples: Sequence[Sample], *, of_messages: bool = False) -> list[float]:
        """Between tokens, or messages, from one within to the next, whenever that one came: a
        stall at the window's end is not left out.
        """
        return [
            later_s - at_s
            for s in samples
            for at_s, later_s in pairwise(s.message_times_s if of_messages else s.token_times_s)
            if self.begin_s <= at_s < self.end_s
        ]

    def num_straddling(self, samples: Sequence[Sample]) -> int:
        """Requests that were under way at its begin or its end."""
        return sum(
            any(s.due_s < border_s < s.ended_s for border_s in (self.begin_s, self.end_s))
            for s in samples
            if s.ended_s is not None
        )

    def _has(self, at_s: float) -> bool:
        """The first token of the last stream begins the window, and is not one of its own."""
        return self.begin_s < at_s <= self.end_s


def measured_window(samples: Sequence[Sample]) -> Window | None:
    """Behind the warm-up. Of a closed load: from when each of its streams has had a token until
    the first of them is idle, which is before the tail. Of an open one: from the first token until
    the last request was sent. None where that is no time at all.
    """
    counted = [sample for sample in samples if not sample.is_warmup]
    if not counted:
        return None
    streams: dict[int | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        streams[sample.stream].append(sample)
    firsts = [
        min((s.token_times_s[0] for s in stream if s.token_times_s), default=None)
        for stream in streams.values()
    ]
    had = [first_s for first_s in firsts if first_s is not None]
    if len(had) < len(firsts):
        return None
    begin_s = max(min(sample.due_s for sample in counted), *had)
    if None in streams:
        end_s = max(sample.sent_s for sample in counted)
    else:
        ends = [[s.ended_s for s in stream if s.ended_s is not None] for stream in streams.values()]
        end_s = min(max(of_stream, default=begin_s) for of_stream in ends)
    return Window(begin_s, end_s) if end_s > begin_s else None
