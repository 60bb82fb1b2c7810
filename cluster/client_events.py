"""Tokens, Finished: what a client's stream brings; Result: all of it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

FinishReason = Literal["stop", "length"]
_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Tokens:
    """What is new of an answer. Text may come behind its tokens, in whole characters."""

    index: int  # which of the n answers, from 0
    text: str
    token_ids: tuple[int, ...]
    token_offset: int  # the place of the first of them in the answer
    logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()  # one a token where they were asked for
    # On the stream's first event, where they were asked for: one a token of the prompt.
    prompt_logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last of an answer."""

    index: int
    finish: generation_pb2.Finish  # usage, timings (those of the router that ended it), stop_reason
    prompt_logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()  # as in Tokens

    @property
    def reason(self) -> FinishReason:
        """By a stop string or token, or by max_tokens."""
        return _REASONS[self.finish.finish_reason]


Event = Tokens | Finished


@dataclass
class AnswerResult:
    """One answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None  # None only while it is collected

    @property
    def finish(self) -> generation_pb2.Finish:
        """Usage, timings, stop_reason."""
        assert self.finished is not None, "a result is whole"
        return self.finished.finish

    @property
    def finish_reason(self) -> FinishReason:
        """By a stop string or token, or by max_tokens."""
        assert self.finished is not None, "a result is whole"
        return self.finished.reason


@dataclass
class Result:
    """All answers to one prompt."""

    request_id: str
    answers: list[AnswerResult]
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0].token_ids

    def add(self, event: Event) -> None:
        """The next of the stream."""
        answer = self.answers[event.index]
        self.prompt_logprobs += event.prompt_logprobs
        if isinstance(event, Finished):
            answer.finished = event
            return
        answer.text += event.text
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """As the message has it."""
    if response.HasField("finish"):
        return Finished(response.index, response.finish, tuple(response.prompt_logprobs))
    delta = response.delta
    return Tokens(
        response.index,
        delta.text,
        tuple(delta.token_ids),
        delta.token_offset,
        tuple(delta.logprobs),
        tuple(response.prompt_logprobs),
    )


def empty_result(request_id: str, num_answers: int) -> Result:
    """To be filled by `Result.add`."""
    return Result(request_id, [AnswerResult() for _ in range(num_answers)])


def collect(request_id: str, num_answers: int, events: Iterable[Event]) -> Result:
    """Reads a stream to its end."""
    result = empty_result(request_id, num_answers)
    for event in events:
        result.add(event)
    return result
