"""Resumption: what had come of a stream that broke, by its client's word, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError, invalid, shown
from legato.cluster.sampling_rules import check_token_ids
from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.protos import generation_pb2

MAX_FINGERPRINT_CHARS = 128
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class Received:
    """What has come of one answer."""

    token_ids: tuple[int, ...] = ()
    num_text_bytes: int = 0  # in UTF-8
    finished: bool = False


@dataclass(frozen=True)
class Resumption:
    """Within every limit that can be told without the model's text."""

    answers: tuple[Received, ...]  # one for each of the n
    # As the first router settled them; None where nothing has come.
    seed: int | None = None
    max_tokens: int | None = None
    model_fingerprint: str | None = None

    @property
    def has_begun(self) -> bool:
        """False where nothing has come: the request begins anew."""
        return self.model_fingerprint is not None

    def settle(self, asked: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
        """What was asked, with what the first router made of it."""
        settled = common_pb2.SamplingParams()
        settled.CopyFrom(asked)
        if self.seed is not None:
            settled.seed = self.seed
        if self.max_tokens is not None:
            settled.max_tokens = self.max_tokens
        return settled


def check_model(request: generation_pb2.GenerateRequest, served: str) -> None:
    """Refuses to go on with an answer that another model began. Comes before all other checks:
    its tokens and text would be wrong by numbers that say nothing.

    Raises:
        RequestError: FAILED_PRECONDITION.
    """
    began = request.resume.start.model_fingerprint
    if len(began) > MAX_FINGERPRINT_CHARS:
        return  # no fingerprint at all: `parse_resumption` says so
    if began not in ("", served):
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"resume.start.model_fingerprint is {shown(began)}, limit {served!r}, that of the "
            "model served here: another one began the answer",
            reason=Reason.OTHER_MODEL,
        )


def parse_resumption(
    request: generation_pb2.GenerateRequest, num_answers: int, vocab_size: int
) -> Resumption | None:
    """None where the request is a new one. `request.sampling` has been checked.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    if not request.HasField("resume"):
        return None
    if not request.request_id:
        raise invalid("request_id is empty, limit at least 1 character: resume needs it")
    resume = request.resume
    if len(resume.answers) > num_answers:
        raise invalid(f"resume.answers has {len(resume.answers)} entries, limit {num_answers} (n)")
    if not resume.HasField("start"):
        if any(answer.ByteSize() for answer in resume.answers):
            raise invalid("resume.start is not set, limit what the stream's first message had")
        return Resumption((Received(),) * num_answers)
    _check_start(resume.start, request.sampling)
    answers = tuple(
        _received(answer, f"resume.answers[{index}]", resume.start.max_tokens, vocab_size)
        for index, answer in enumerate(resume.answers)
    )
    if sum(answer.finished for answer in answers) == num_answers:
        raise invalid(f"resume.answers: all {num_answers} are finished, limit {num_answers - 1}")
    return Resumption(
        answers + (Received(),) * (num_answers - len(answers)),
        seed=resume.start.seed,
        max_tokens=resume.start.max_tokens,
        model_fingerprint=resume.start.model_fingerprint,
    )


def _check_start(start: generation_pb2.StreamStart, asked: common_pb2.SamplingParams) -> None:
    if start.seed < 0:
        raise invalid(f"resume.start.seed is {start.seed}, limit [0, {INT64_MAX}]")
    if asked.HasField("seed") and asked.seed != start.seed:
        raise invalid(f"resume.start.seed is {start.seed}, limit {asked.seed} (sampling.seed)")
    most = max(1, asked.max_tokens) if asked.HasField("max_tokens") else INT32_MAX
    if not 1 <= start.max_tokens <= most:
        raise invalid(f"resume.start.max_tokens is {start.max_tokens}, limit [1, {most}]")
    fingerprint = start.model_fingerprint
    if not 1 <= len(fingerprint) <= MAX_FINGERPRINT_CHARS:
        raise invalid(
            f"resume.start.model_fingerprint has {len(fingerprint)} chars, "
            f"limit [1, {MAX_FINGERPRINT_CHARS}]"
        )


def _received(
    answer: generation_pb2.ReceivedAnswer, field: str, max_tokens: int, vocab_size: int
) -> Received:
    if len(answer.token_ids) > max_tokens:
        raise invalid(
            f"{field}.token_ids has {len(answer.token_ids)} entries, limit {max_tokens} "
            "(resume.start.max_tokens)"
        )
    check_token_ids(f"{field}.token_ids", answer.token_ids, vocab_size)
    if answer.num_text_bytes < 0:
        raise invalid(f"{field}.num_text_bytes is {answer.num_text_bytes}, limit [0, {INT32_MAX}]")
    return Received(tuple(answer.token_ids), answer.num_text_bytes, answer.finished)
