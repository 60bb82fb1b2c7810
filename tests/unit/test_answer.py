"""Answer: tokens in, deltas out, with proof that none is lost or doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from router_service import FakeAnswerText, FakeDelta

from legato.cluster.answer import Answer
from legato.cluster.attempt_errors import WorkerFaultError
from legato.cluster.request import RequestSpec
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


def test_tokens_that_come_again_are_not_told_again() -> None:
    answer = Answer(spec(6), FakeAnswerText(None, (), 0))
    answer.take(tokens(0, 1, 2), finished=False)
    answer.begin(1)
    again = answer.take(tokens(1), finished=False)
    assert (again.text, list(again.token_ids)) == ("", [])
    partly = answer.take(tokens(2, 3), finished=False)
    assert (partly.text, list(partly.token_ids), partly.token_offset) == ("d", [ord("d")], 3)
    answer.begin(4)
    last = answer.take(tokens(4, 5), finished=True)
    assert (last.text, last.token_offset, answer.num_left) == ("ef", 4, 0)
    answer.begin(5)
    assert not answer.take(tokens(5), finished=True).token_ids


@pytest.mark.parametrize(
    ("came", "finished", "sentence"),
    [
        ((1, 3), False, "token 3 came where 2 was expected"),
        ((2,), False, "token 2 came where 1 was expected"),
        ((1, 2, 3, 4), False, "4 tokens came where at most 3 were left"),
        ((1,), True, "the answer ended after 2 tokens where it went on before"),
    ],
)
def test_tokens_that_come_again_must_be_the_same(
    came: tuple[int, ...], finished: bool, sentence: str
) -> None:
    answer = Answer(spec(), FakeAnswerText(None, (), 0))
    answer.take(tokens(0, 1, 2), finished=False)
    answer.begin(1)
    with pytest.raises(WorkerFaultError, match=sentence):
        answer.take(tokens(*came), finished=finished)


def test_another_token_than_before_is_a_fault() -> None:
    answer = Answer(spec(), FakeAnswerText(None, (), 0))
    answer.take(tokens(0, 1, 2), finished=False)
    answer.begin(1)
    other = worker_pb2.SampledToken(token_id=5, index=1)
    with pytest.raises(WorkerFaultError, match="token 1 is 5 where it was 98 before"):
        answer.take([other], finished=False)


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
