"""Requests of named fields, and limits of a small service to hold them to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.cluster.model_limits import ModelLimits
from legato.cluster.request import RequestSpec, parse_request
from legato.protos import generation_pb2
from legato.worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from legato.cluster.text.model_text import ModelText

LIMITS = ModelLimits(
    context_length=64,
    vocab_size=320,
    prefill_kv_tokens=10_000,
    decode_kv_tokens=10_000,
    decode_block_size=16,
)


def request(**fields: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401  # the message's fields
    """Prompt "hi" unless another is given; unknown names are fields of `sampling`."""
    message = generation_pb2.GenerateRequest()
    names = message.DESCRIPTOR.fields_by_name
    if not fields.keys() & {"text", "token_ids", "messages"}:
        message.text = "hi"
    for name, value in fields.items():
        if name == "token_ids":
            message.token_ids.ids.extend(value)
            message.token_ids.SetInParent()
        elif name == "messages":
            for role, content in value:
                message.messages.messages.add(role=role, content=content)
            message.messages.SetInParent()
        elif name in names:
            setattr(message, name, value)
        elif name == "logit_bias":
            for key, bias in value.items():
                message.sampling.logit_bias[key] = bias
        elif name in ("stop", "stop_token_ids"):
            getattr(message.sampling, name).extend(value)
        else:
            setattr(message.sampling, name, value)
    return message


def limits(**changes: int) -> ModelLimits:
    return ModelLimits(**(vars(LIMITS) | changes))


def parse(
    model: ModelText,
    limits: ModelLimits = LIMITS,
    **fields: Any,  # noqa: ANN401  # as in `request`
) -> RequestSpec:
    spec = parse_request(request(**fields), model, limits)
    SamplingParams.from_proto(spec.sampling)  # complete enough for a worker
    return spec
