"""Streams that are cut: what their client has then, and whether the rest is what was to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from legato.cluster.client_events import empty_result, event_of
from legato.cluster.client_stream import StreamState
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from raw_client import RawClient

    from legato.cluster.client_events import AnswerResult

Responses = list[generation_pb2.GenerateResponse]


async def read(
    client: RawClient, request: generation_pb2.GenerateRequest, timeout_s: float = 20.0
) -> Responses:
    """One call, to its end."""
    return [response async for response in client.generate(request, timeout_s=timeout_s)]


def rest_of(
    request: generation_pb2.GenerateRequest, responses: Responses
) -> tuple[StreamState, generation_pb2.GenerateRequest]:
    """A client that has these messages, and what it asks next."""
    state = StreamState(request)
    assert state.next_request() == request
    for response in responses:
        state.take(response)
    return state, state.next_request()


def answers_of(state: StreamState, responses: Responses) -> list[AnswerResult]:
    result = empty_result("", len(state.answers))
    for response in responses:
        result.add(event_of(response))
    return result.answers


async def check_every_cut(
    first: RawClient, other: RawClient, request: generation_pb2.GenerateRequest, *, step: int = 1
) -> Responses:
    """Reads a stream of `first`; cut behind any (or each `step`-th) message but the last one, its
    rest comes from `other`, and both together are what was not cut.
    """
    whole = await read(first, request)
    state, _ = rest_of(request, whole)
    assert state.done
    wanted = answers_of(state, whole)
    cuts = [*range(0, len(whole), step), len(whole) - 1]
    for num_messages in dict.fromkeys(cuts):
        state, resumed = rest_of(request, whole[:num_messages])
        if num_messages == 0:  # then the seed may be another
            resumed.sampling.seed = whole[0].start.seed
        else:
            assert resumed.resume.start == whole[0].start
        rest = await read(other, resumed)
        for response in rest:
            state.take(response)  # proves that the offsets go on
        assert state.done
        got = answers_of(state, whole[:num_messages] + rest)
        for index, (mine, uncut) in enumerate(zip(got, wanted, strict=True)):
            where = f"answer {index}, cut behind {num_messages} messages"
            assert mine.token_ids == uncut.token_ids, where
            assert mine.text == uncut.text, where
            check_logprobs(mine, uncut)
            assert mine.finish_reason == uncut.finish_reason, where
            assert mine.finish.stop_reason == uncut.finish.stop_reason, where
            usage, uncut_usage = mine.finish.usage, uncut.finish.usage
            assert usage.seed == uncut_usage.seed
            assert usage.prompt_tokens == uncut_usage.prompt_tokens
            assert usage.completion_tokens == uncut_usage.completion_tokens == len(mine.token_ids)
    return whole


def check_logprobs(mine: AnswerResult, uncut: AnswerResult) -> None:
    """Prefill computes in another order what decode computed before."""
    assert len(mine.logprobs) == len(uncut.logprobs)
    for one, other in zip(mine.logprobs, uncut.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [top.token_id for top in one.top] == [top.token_id for top in other.top]
