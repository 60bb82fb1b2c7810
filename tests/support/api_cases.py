"""Answers to one request, over a pair and over one worker alone, that must be the same."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from local_service import LocalService
from script_model import Script
from tiny_models import EOS, IM_END

from legato.protos import common_pb2, generation_pb2
from legato.protos.status_details import ErrorDetails, read_details

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


OTHER_EOS = IM_END
SCRIPT = Script(
    {
        "dots": b"",  # room for prompts
        "stop": b"abSTOPcd",
        "eos": [*b"ab", OTHER_EOS, *b"cd", EOS, *b"ef"],
        "text": " a  b 😀é\n\tç".encode(),
        "end": b"xyST",
    }
)


@dataclass
class Answer:
    """What came of one of the answers."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


@dataclass
class Outcome:
    """What came of a request: answers, or an error."""

    answers: list[Answer]
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    message: str = ""
    details: ErrorDetails = field(default_factory=ErrorDetails)

    def comparable(self) -> tuple[object, ...]:
        """All that must be the same wherever it is served, but for logprobs."""
        answers = [
            (a.token_ids, a.text, a.finish.finish_reason, a.finish.stop_reason,
             a.finish.usage.prompt_tokens, a.finish.usage.completion_tokens)
            for a in self.answers
        ]  # fmt: skip
        return answers, self.code, self.message, self.details

    def numbers(self) -> list[tuple[float, list[int], list[float]]]:
        """Of all logprobs."""
        entries = [*self.prompt_logprobs, *(e for a in self.answers for e in a.logprobs)]
        return [
            (e.logprob, [t.token_id for t in e.top], [t.logprob for t in e.top]) for e in entries
        ]


async def ask(service: LocalService, message: generation_pb2.GenerateRequest) -> Outcome:
    """Reads all answers, and checks that each is a stream as the proto says."""
    outcome = Outcome([Answer() for _ in range(max(1, min(128, message.n)))])
    finished: set[int] = set()
    first = True
    try:
        async for response in service.generation.Generate(message, timeout=60):
            answer = outcome.answers[response.index]
            assert response.index not in finished, "a message behind the finish"
            assert response.HasField("start") == first
            assert first or not response.prompt_logprobs
            outcome.prompt_logprobs += response.prompt_logprobs
            first = False
            if response.HasField("finish"):
                answer.finish = response.finish
                finished.add(response.index)
                assert response.finish.usage.completion_tokens == len(answer.token_ids)
                continue
            assert response.delta.token_offset == len(answer.token_ids)
            answer.token_ids += response.delta.token_ids
            answer.deltas.append(response.delta.text)
            answer.logprobs += response.delta.logprobs
        assert len(finished) == len(outcome.answers)
    except grpc.aio.AioRpcError as error:
        details = read_details(tuple(error.trailing_metadata() or ()))
        return Outcome([], [], error.code(), error.details() or "", details)
    return outcome


class Place:
    """One model, served by a pair and by one worker alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pair = LocalService(folder, worker_args=["--block-size", "16"])
        self.alone = LocalService(
            folder, prefill=0, decode=0, colocated=1, worker_args=["--block-size", "16"]
        )

    async def ask(self, message: generation_pb2.GenerateRequest) -> Outcome:
        """Of both, which must agree."""
        outcome, other = await asyncio.gather(ask(self.pair, message), ask(self.alone, message))
        assert outcome.comparable() == other.comparable()
        numbers, others = outcome.numbers(), other.numbers()
        assert len(numbers) == len(others)
        for (own, ids, top), (other_own, other_ids, other_top) in zip(numbers, others, strict=True):
            assert ids == other_ids
            assert [own, *top] == pytest.approx([other_own, *other_top], abs=1e-4)
        return outcome


def request(
    model: str,
    prompt: str | Sequence[int] | Sequence[tuple[str, str]],
    *,
    n: int | None = None,
    cache_salt: str = "",
    priority: int = 0,
    parse_special_tokens: bool = False,
    request_id: str = "",
    **sampling: Any,  # noqa: ANN401  # of many types
) -> generation_pb2.GenerateRequest:
    """Greedy unless `sampling` says otherwise. A name of the script stands for its prompt."""
    message = generation_pb2.GenerateRequest(
        n=n,
        cache_salt=cache_salt,
        priority=priority,  # type: ignore[arg-type]  # unknown ones are cases too
        parse_special_tokens=parse_special_tokens,
        request_id=request_id,
        sampling=common_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
    )
    if model == "script" and isinstance(prompt, str):
        prompt = SCRIPT.prompt(prompt)
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], tuple):
        for role, content in prompt:  # type: ignore[misc]  # as just seen
            message.messages.messages.add(role=role, content=content)
    else:
        message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # as just seen
    return message
