"""What a client saw of each request, and the checks that prove it whole: pure, no clock, no socket.

Each check returns sentences about what is wrong; none means that all is well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Replays compute the KV of a decode step in a prefill instead.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Piece:
    """One delta, or the finish of one answer."""

    at_s: float  # Unix time
    answer: int
    offset: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: common_pb2.FinishReason.ValueType | None = None  # None: a delta
    stop_reason: str = ""
    num_tokens: int = 0  # as the finish has it
    attempts: int = 1  # likewise


@dataclass
class CallHistory:
    """One call of a client, from the asking to its end."""

    request_id: str
    num_answers: int
    asked_at_s: float
    pieces: list[Piece] = field(default_factory=list)
    error: str = ""  # the status that ended it, where none of ours did
    cancelled_at_s: float | None = None
    ended_at_s: float = math.inf

    def of(self, answer: int) -> Iterator[Piece]:
        """The pieces of one answer, in their order."""
        return (piece for piece in self.pieces if piece.answer == answer)

    def token_ids(self, answer: int) -> list[int]:
        """All that came."""
        return [token for piece in self.of(answer) for token in piece.token_ids]

    def text(self, answer: int) -> str:
        """All that came."""
        return "".join(piece.text for piece in self.of(answer))

    def finish(self, answer: int) -> Piece | None:
        """How the answer ended, if it did."""
        return next((p for p in self.of(answer) if p.finish_reason is not None), None)


def check_call(call: CallHistory, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Contiguous offsets from 0, one finish of each answer or one error or a cancel, nothing after
    any of them, and the text is the decode of the tokens.
    """
    wrong: list[str] = []
    next_offset = dict.fromkeys(range(call.num_answers), 0)
    finished: set[int] = set()
    for piece in call.pieces:
        name = f"{call.request_id}[{piece.answer}]"
        if piece.answer not in next_offset:
            wrong.append(f"{name}: there is no such answer")
            continue
        if piece.answer in finished:
            what = "a second finish" if piece.finish_reason is not None else "a delta"
            wrong.append(f"{name}: {what} after its finish")
        if call.cancelled_at_s is not None and piece.at_s > call.cancelled_at_s:
            wrong.append(f"{name}: a message {piece.at_s - call.cancelled_at_s:.3f} s after cancel")
        if piece.finish_reason is not None:
            finished.add(piece.answer)
            if piece.num_tokens != next_offset[piece.answer]:
                came = next_offset[piece.answer]
                wrong.append(f"{name}: {came} tokens came, its finish says {piece.num_tokens}")
            continue
        expected = next_offset[piece.answer]
        if piece.offset != expected:
            what = "lost" if piece.offset > expected else "doubled"
            wrong.append(f"{name}: tokens {what}: offset {piece.offset}, expected {expected}")
        next_offset[piece.answer] = piece.offset + len(piece.token_ids)
    wrong += _check_end(call, finished)
    for answer in sorted(finished & next_offset.keys()):
        wrong += _check_text(call, answer, decode)
    return wrong


def _check_end(call: CallHistory, finished: set[int]) -> list[str]:
    missing = set(range(call.num_answers)) - finished
    if call.error and call.cancelled_at_s is None:
        return [f"{call.request_id}: {call.error}"]
    if missing and call.cancelled_at_s is None:
        return [f"{call.request_id}: ended without the finish of {sorted(missing)}"]
    if not math.isfinite(call.ended_at_s):
        return [f"{call.request_id}: never ended"]
    return []


def _check_text(
    call: CallHistory, answer: int, decode: Callable[[Sequence[int]], str]
) -> list[str]:
    finish = call.finish(answer)
    text, whole = call.text(answer), decode(call.token_ids(answer))
    if finish is not None and finish.finish_reason == common_pb2.FINISH_REASON_STOP:
        # All up to the stop string, or to the stop token, which may have no text.
        rest = whole.removeprefix(text)
        if whole == text + rest and (not rest or rest.startswith(finish.stop_reason)):
            return []
    elif whole == text:
        return []
    return [f"{call.request_id}[{answer}]: the text is {text!r}, its tokens read {whole!r}"]


def check_equal(call: CallHistory, reference: CallHistory) -> list[str]:
    """The same tokens, text, ending and logprobs; of a cancelled call, as far as it got."""
    wrong: list[str] = []
    for answer in range(call.num_answers):
        name = f"{call.request_id}[{answer}]"
        tokens, expected = call.token_ids(answer), reference.token_ids(answer)
        if call.cancelled_at_s is not None and call.finish(answer) is None:
            expected = expected[: len(tokens)]
        elif call.text(answer) != reference.text(answer):
            wrong.append(f"{name}: another text than without the fault")
        if tokens != expected:
            pairs = zip(tokens, expected, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            wrong.append(
                f"{name}: {len(tokens)} tokens differ from {len(expected)} of the reference at "
                f"{first}"
            )
        finish, other = call.finish(answer), reference.finish(answer)
        if finish is not None and other is not None:
            ending = (finish.finish_reason, finish.stop_reason)
            if ending != (other.finish_reason, other.stop_reason):
                wrong.append(f"{name}: ended by {ending}, the reference did not")
        logprobs, others = (
            [value for piece in history.of(answer) for value in piece.logprobs]
            for history in (call, reference)
        )
        if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(logprobs, others, strict=False)):
            wrong.append(f"{name}: other logprobs than without the fault")
    return wrong


def check_all(
    calls: Iterable[CallHistory],
    references: Mapping[str, CallHistory],
    decode: Callable[[Sequence[int]], str],
) -> list[str]:
    """Every call by itself, and against its reference, where it has one by its request's id."""
    wrong: list[str] = []
    for call in calls:
        wrong += check_call(call, decode)
        if (reference := references.get(call.request_id)) is not None:
            wrong += check_equal(call, reference)
    return wrong
