"""Conversions of engine events to protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import common_pb2, worker_pb2
from legato.worker.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from legato.worker.mailbox import TokenEvent
    from legato.worker.sequence import Sequence

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def answer_start(event: TokenEvent) -> worker_pb2.AnswerStart:
    """An answer's first token."""
    return worker_pb2.AnswerStart(
        token=_sampled_token(event),
        finished=event.finish_reason is not None,
        finish_reason=_FINISH_REASONS[event.finish_reason],
    )


def first_token_message(
    events: SequenceOf[TokenEvent], sequence: Sequence
) -> worker_pb2.FirstToken:
    """The first tokens of all answers to the sequence's prompt."""
    last = events[-1]  # all have the same figures: they come of the same step
    message = worker_pb2.FirstToken(
        answers=[answer_start(event) for event in events],
        wait_s=last.wait_s,
        model_s=last.model_s,
        prefill_forwards=last.num_forwards,
        cached_tokens=sequence.num_cached,
    )
    scores = sequence.prompt_scores
    if scores is not None:
        message.prompt_logprobs.SetInParent()  # a prompt of one token has none
        for own, values, ids in zip(scores.own, scores.top_values, scores.top_ids, strict=True):
            message.prompt_logprobs.logprobs.extend(own.tolist())
            message.prompt_logprobs.top_logprobs.extend(values.flatten().tolist())
            message.prompt_logprobs.top_token_ids.extend(ids.flatten().tolist())
    return message


def tokens_message(
    answer: int, events: SequenceOf[TokenEvent], first: TokenEvent | None = None
) -> worker_pb2.Tokens:
    """One answer's tokens, at least one, with its figures as of the last of them. `first`: of an
    answer that was prefilled here; up to it the figures are prefill's.
    """
    last = events[-1]
    return worker_pb2.Tokens(
        tokens=[_sampled_token(event) for event in events],
        finished=last.finish_reason is not None,
        finish_reason=_FINISH_REASONS[last.finish_reason],
        decode_forwards=last.num_forwards - (first.num_forwards if first is not None else 0),
        model_s=last.model_s - (first.model_s if first is not None else 0.0),
        answer=answer,
        swaps=last.num_swaps,
    )


def _sampled_token(event: TokenEvent) -> worker_pb2.SampledToken:
    """With logprobs where the request asked for them."""
    message = worker_pb2.SampledToken(token_id=event.sampled.token_id, index=event.index)
    if event.sampled.logprob is not None:
        message.logprobs.logprob = event.sampled.logprob
        for token_id, logprob in event.sampled.top:
            message.logprobs.top.add(token_id=token_id, logprob=logprob)
    return message
