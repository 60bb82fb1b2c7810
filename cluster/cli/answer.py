"""Answer: one generation as a client sees it, text, times and all."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.cluster.client_events import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from legato.cluster.client_events import Event
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
    events: Iterable[Event],
    on_text: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Reads a stream of one answer to its end. `on_text` gets every piece of text as it comes."""
    [answer] = read_answers(events, 1, lambda _, text: on_text(text), clock)
    return answer


def read_answers(
    events: Iterable[Event],
    num_answers: int,
    on_text: Callable[[int, str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Answer]:
    """Reads a stream to its end.

    `on_text` gets the index of an answer with every piece of its text as it comes, and with ""
    when it has finished.
    """
    started_s = clock()
    answers = [Answer() for _ in range(num_answers)]
    for event in events:
        answer = answers[event.index]
        if isinstance(event, Finished):
            answer.finish = event.finish
            on_text(event.index, "")
            continue
        answer.token_ids += event.token_ids
        answer.token_times_s += _spread(answer, clock() - started_s, len(event.token_ids))
        if event.text:
            answer.text += event.text
            on_text(event.index, event.text)
    return answers


class InTurn:
    """Shows several answers one after the other, though their pieces come mixed.

    The first that has not finished is shown as it comes, the others when it is their turn.
    """

    def __init__(self, num_answers: int, write: Callable[[str], None]) -> None:
        self._write = write
        self._kept = [""] * num_answers
        self._finished = [False] * num_answers
        self._shown = 0  # which one's turn it is
        self._begun = False  # nothing is shown before there is something

    def take(self, index: int, text: str) -> None:
        """As `read_answers` tells it: "" at an answer's end."""
        if not self._begun:
            self._begin()
        self._finished[index] |= not text
        if index != self._shown:
            self._kept[index] += text
            return
        if text:
            self._write(text)
        while self._shown < len(self._kept) and self._finished[self._shown]:
            self._shown += 1
            if self._shown < len(self._kept):
                self._write("\n\n")
                self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._write(f"[{self._shown + 1} of {len(self._kept)}]\n{self._kept[self._shown]}")


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
