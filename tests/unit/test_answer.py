"""Answer: tokens in, deltas out, with proof that none is lost or doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from router_service import FakeAnswerText, FakeDelta

from legato.cluster.answer import Answer
from legato.cluster.request import RequestSpec
from legato.cluster.worker_calls import WorkerFaultError
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


def spec(max_tokens: int = 4) -> RequestSpec:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    return RequestSpec("r", (1, 2), sampling, (), (), batch_priority=False, cache_salt="")


def tokens(*indices: int) -> list[worker_pb2.SampledToken]:
    return [worker_pb2.SampledToken(token_id=ord("a") + i, index=i) for i in indices]


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        ((0, 2), "token 2 came where 1 was expected"),  # lost
        ((0, 0), "token 0 came where 1 was expected"),  # doubled
        ((1,), "token 1 came where 0 was expected"),
        ((0, 1, 2, 3, 4), "5 tokens came where at most 4 were left"),
    ],
)
def test_a_token_that_is_not_the_next_is_a_fault(indices: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(WorkerFaultError, match=sentence):
        Answer(spec(), FakeAnswerText(None, (), 0)).take(tokens(*indices), finished=False)


def test_offsets_go_on_over_messages() -> None:
    answer = Answer(spec(), FakeAnswerText(None, (), 0))
    first = answer.take(tokens(0), finished=False)
    second = answer.take(tokens(1, 2), finished=False)
    assert (first.token_offset, second.token_offset) == (0, 1)
    assert list(second.token_ids) == [ord("b"), ord("c")]
    assert answer.num_left == 1


class StopsAtFinish:
    """Text that only the end makes certain, and that completes a stop string."""

    stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> FakeDelta:
        return FakeDelta("ab", len(token_ids), None)

    def finish(self) -> str:
        self.stop = "\ufffd"
        return ""


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    answer = Answer(spec(), StopsAtFinish())
    delta = answer.take(tokens(0, 1), finished=True)
    assert delta.text == "ab"
    assert answer.stopped_by == "\ufffd"
