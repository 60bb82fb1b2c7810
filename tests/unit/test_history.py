"""The checkers of histories find each kind of violation, and nothing where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from history import CallHistory, Piece, check_all, check_call, check_equal
from owners import Strike, check_owners, hits_of

from legato.protos import common_pb2

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def decode(token_ids: Any) -> str:  # noqa: ANN401  # a sequence of token ids
    return "".join(map(chr, token_ids))


def delta(at_s: float, offset: int, text: str, answer: int = 0) -> Piece:
    return Piece(at_s, answer, offset, tuple(map(ord, text)), text, (0.5,) * len(text))


def finish(at_s: float, num_tokens: int, answer: int = 0, **ending: Any) -> Piece:  # noqa: ANN401
    ending = {"finish_reason": LENGTH, **ending}
    return Piece(at_s, answer, num_tokens=num_tokens, **ending)


def call(*pieces: Piece, num_answers: int = 1, **how: Any) -> CallHistory:  # noqa: ANN401
    return CallHistory("r", num_answers, 0.0, list(pieces), ended_at_s=9.0, **how)


WHOLE = (delta(1, 0, "ab"), delta(2, 2, "c"), finish(3, 3))


def test_a_whole_answer_is_well() -> None:
    assert check_call(call(*WHOLE), decode) == []
    assert check_equal(call(*WHOLE), call(*WHOLE)) == []
    two = (delta(1, 0, "a"), delta(1, 0, "x", 1), finish(2, 1, 1), finish(3, 1))
    assert check_call(call(*two, num_answers=2), decode) == []
    stopped = (delta(1, 0, "ab"), replace(delta(2, 2, "c#"), text="c"))
    ending = finish(3, 4, finish_reason=STOP, stop_reason="#")
    assert check_call(call(*stopped, ending), decode) == []
    cancelled = call(*WHOLE[:1], cancelled_at_s=1.5)
    assert check_all([cancelled], {"r": call(*WHOLE)}, decode) == []


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ((delta(1, 0, "a"), delta(2, 2, "c"), finish(3, 3)), "tokens lost: offset 2, expected 1"),
        ((delta(1, 0, "ab"), delta(2, 1, "b"), finish(3, 2)), "tokens doubled: offset 1"),
        ((delta(1, 1, "b"), finish(3, 2)), "tokens lost: offset 1, expected 0"),
        ((*WHOLE, finish(4, 3)), "a second finish after its finish"),
        ((*WHOLE, delta(4, 3, "d")), "a delta after its finish"),
        (WHOLE[:2], "ended without the finish of [0]"),
        ((*WHOLE[:2], finish(3, 4)), "3 tokens came, its finish says 4"),
        ((replace(WHOLE[0], text="a"), *WHOLE[1:]), "the text is 'ac', its tokens read 'abc'"),
        ((*WHOLE, delta(1, 0, "x", 1)), "there is no such answer"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(pieces: tuple[Piece, ...], sentence: str) -> None:
    assert any(sentence in wrong for wrong in check_call(call(*pieces), decode))


def test_an_error_a_late_token_and_a_call_without_end_are_said() -> None:
    assert check_call(call(error="UNAVAILABLE gone"), decode) == ["r: UNAVAILABLE gone"]
    late = check_call(call(*WHOLE, cancelled_at_s=1.5), decode)
    assert "r[0]: a message 0.500 s after cancel" in late
    endless = CallHistory("r", 1, 0.0, list(WHOLE))
    assert check_call(endless, decode) == ["r: never ended"]


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ((delta(1, 0, "abd"), finish(3, 3)), "3 tokens differ from 3 of the reference at 2"),
        ((delta(1, 0, "ab"), finish(3, 2)), "2 tokens differ from 3 of the reference at the end"),
        ((*WHOLE[:2], finish(3, 3, finish_reason=STOP)), "the reference did not"),
        ((replace(WHOLE[0], text="aB"), *WHOLE[1:]), "another text than without the fault"),
        ((replace(WHOLE[0], logprobs=(0.5, 0.7)), *WHOLE[1:]), "other logprobs"),
    ],
)
def test_another_answer_than_without_the_fault_is_said(
    pieces: tuple[Piece, ...], sentence: str
) -> None:
    assert any(sentence in wrong for wrong in check_equal(call(*pieces), call(*WHOLE)))


def lines(*told: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"at_s": float(number), "event": event, "request": "r", **fields}
        for number, (event, fields) in enumerate(told)
    ]


RECEIVED = ("received", {"answers": 1})
ENDED = ("ended", {"outcome": "completed"})


def phase(name: str, tokens: int = 0) -> tuple[str, dict[str, Any]]:
    return "phase", {"answer": 0, "phase": name, "tokens": tokens}


def begun(attempt: int, decode: str = "d1") -> tuple[str, dict[str, Any]]:
    return "begun", {"answer": 0, "attempt": attempt, "prefill": "p1", "decode": decode}


def left(attempt: int, tokens: int = 0) -> tuple[str, dict[str, Any]]:
    return "left", {"answer": 0, "attempt": attempt, "tokens": tokens}


MOVED = (
    RECEIVED,
    phase("queue"),
    begun(1),
    phase("prefill"),
    ("retargeted", {"answer": 0, "attempt": 1, "decode": "d2"}),
    phase("handoff", 1),
    phase("decode", 1),
    left(1, 7),
    phase("queue", 7),
    begun(2, "d3"),
    phase("decode", 8),
    left(2, 9),
    ENDED,
)


def test_a_request_that_is_moved_has_one_owner_at_a_time() -> None:
    assert check_owners(lines(*MOVED), {}) == []
    assert check_owners(lines(*MOVED), {"r": 11.0}) == []


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ((RECEIVED, begun(1), begun(2), left(2), ENDED), "attempt 2 begins while attempt 1 has it"),
        ((RECEIVED, begun(1), ENDED), "ended while attempt 1 had it"),
        ((RECEIVED, begun(1), left(1), left(1), ENDED), "left attempt 1, but None has it"),
        ((RECEIVED, begun(1), left(1), ENDED, phase("decode", 3)), "phase after it had ended"),
        ((RECEIVED, begun(1), left(1), ENDED, ENDED), "ended after it had ended (completed)"),
        ((RECEIVED, phase("decode"), ENDED), "in phase decode, and nobody has it"),
        ((RECEIVED, begun(1), left(1, 9), phase("queue", 8), ENDED), "8 tokens where it had 9"),
        ((RECEIVED, RECEIVED, ENDED), "received a second time"),
        ((begun(1), left(1), ENDED), "begun before it was received"),
        ((RECEIVED, begun(1), left(1)), "never ended"),
    ],
)
def test_what_is_wrong_with_the_owners_is_said(told: Any, sentence: str) -> None:  # noqa: ANN401
    assert any(sentence in wrong for wrong in check_owners(lines(*told), {}))


def test_a_cancelled_request_that_lives_on_is_said() -> None:
    (wrong,) = check_owners(lines(*MOVED), {"r": 1.0})
    assert wrong == "r: ended 11.0 s after its client had cancelled it"


def test_hits_are_counted_by_role_and_phase() -> None:
    strikes = [
        Strike(3.5, "d1", "decode", 1),
        Strike(4.5, "d1", "decode", 1),  # the request has gone elsewhere
        Strike(5.5, "d2", "decode", 1),
        Strike(6.5, "p1", "prefill", 1),  # done by then
        Strike(6.6, "d2", "decode", 1),
        Strike(8.5, "d2", "decode", 1),
    ]
    assert hits_of(lines(*MOVED), strikes) == {
        "decode/prefill": 1,
        "decode/handoff": 1,
        "decode/decode": 1,
        "queued": 1,
    }
