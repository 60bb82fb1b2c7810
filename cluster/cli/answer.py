"""Answer: one generation as a client sees it, text, times and all."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from legato.protos import generation_pb2


@dataclass
class Answer:
    """What came, and when; times are seconds since the request was sent."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)  # one a token
    finish: generation_pb2.Finish | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def read_answer(
    responses: Iterable[generation_pb2.GenerateResponse],
    on_text: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Reads a stream to its end. `on_text` gets every piece of text at once as it comes."""
    started_s = clock()
    answer = Answer()
    for response in responses:
        if response.WhichOneof("event") == "finish":
            answer.finish = response.finish
            continue
        delta = response.delta
        answer.token_ids += delta.token_ids
        answer.token_times_s += _spread(answer, clock() - started_s, len(delta.token_ids))
        if delta.text:
            answer.text += delta.text
            on_text(delta.text)
    return answer


def _spread(answer: Answer, now_s: float, num_tokens: int) -> list[float]:
    """Tokens that share a message are taken to have come evenly since the one before."""
    if not answer.token_times_s:
        return [now_s] * num_tokens
    last_s = answer.token_times_s[-1]
    return [last_s + (now_s - last_s) * (i + 1) / num_tokens for i in range(num_tokens)]


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: always a value that was measured."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
