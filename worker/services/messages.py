"""Conversions of engine events to protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import common_pb2, worker_pb2
from legato.worker.sequence import FinishReason

if TYPE_CHECKING:
    from legato.worker.mailbox import TokenEvent

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def finish_reason(event: TokenEvent) -> common_pb2.FinishReason.ValueType:
    """UNSPECIFIED while the answer goes on."""
    return _FINISH_REASONS[event.finish_reason]


def sampled_token(event: TokenEvent) -> worker_pb2.SampledToken:
    """With logprobs where the request asked for them."""
    message = worker_pb2.SampledToken(token_id=event.sampled.token_id, index=event.index)
    if event.sampled.logprob is not None:
        message.logprobs.logprob = event.sampled.logprob
        for token_id, logprob in event.sampled.top:
            message.logprobs.top.add(token_id=token_id, logprob=logprob)
    return message
