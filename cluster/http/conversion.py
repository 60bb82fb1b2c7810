"""Conversion: a request's fields as GenerateRequests; their ranges are checked with gRPC's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from legato.cluster.client_requests import PRIORITIES
from legato.cluster.http.error_response import wrong_field
from legato.cluster.request import MAX_N
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from legato.cluster.http.chat_fields import ChatFields
    from legato.cluster.http.completion_fields import CompletionFields
    from legato.cluster.http.shared_fields import ResponseFormat, SharedFields

MAX_CHOICES = 256  # answers to all prompts of one request
# Those that are called the same in SamplingParams.
_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
)


def chat_request(fields: ChatFields) -> generation_pb2.GenerateRequest:
    """Without an id.

    Raises:
        RequestError: two fields are at odds.
    """
    request = _request(fields)
    for message in fields.messages:
        # OpenAI's newer name of it, which templates do not know.
        role = "system" if message.role == "developer" else message.role
        request.messages.messages.add(role=role, content=message.content)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise wrong_field(
            "top_logprobs", f" is {fields.top_logprobs}, limit requests with logprobs true"
        )
    if fields.logprobs:
        request.sampling.logprobs = fields.top_logprobs or 0
    return request


def completion_requests(fields: CompletionFields) -> list[generation_pb2.GenerateRequest]:
    """One a prompt, without ids.

    Raises:
        RequestError: two fields are at odds, or ask for too many answers together.
    """
    _check_num_choices(len(fields.prompt), fields.n)
    shared = _request(fields)
    if fields.logprobs is not None:
        shared.sampling.logprobs = fields.logprobs
        if fields.echo:
            shared.sampling.prompt_logprobs = fields.logprobs
    requests = []
    for prompt in fields.prompt.items:
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(shared)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
        requests.append(request)
    return requests


def _check_num_choices(num_prompts: int, n: int | None) -> None:
    """Each is within its own limit; together they are the work."""
    if n is not None and 1 <= n <= MAX_N and num_prompts * n > MAX_CHOICES:
        raise wrong_field(
            "n",
            f" is {n}, limit {MAX_CHOICES // num_prompts}: prompt has {num_prompts}, and a "
            f"request has at most {MAX_CHOICES} answers to all of them",
        )


def _request(fields: SharedFields) -> generation_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        max_tokens=_max_tokens(fields),
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        logit_bias=fields.logit_bias,
    )
    for name in _SCALARS:
        value = getattr(fields, name)
        if value is not None:
            setattr(sampling, name, value)
    request = generation_pb2.GenerateRequest(
        sampling=sampling,
        n=fields.n,
        cache_salt=fields.cache_salt or "",
        parse_special_tokens=bool(fields.parse_special_tokens),
    )
    if fields.response_format is not None:
        _set_guide(sampling=request.sampling, asked=fields.response_format)
    if fields.priority is not None:
        request.priority = PRIORITIES[fields.priority]
    return request


def _set_guide(sampling: common_pb2.SamplingParams, asked: ResponseFormat) -> None:
    of_schema = asked.type == "json_schema"
    if of_schema != (asked.json_schema is not None):
        state = "set" if asked.json_schema is not None else "not set"
        raise wrong_field(
            "response_format.json_schema",
            f" is {state}, limit: where the type is json_schema, and nowhere else; type is "
            f"{asked.type!r}",
        )
    if asked.json_schema is not None:
        sampling.guide.json_schema = json.dumps(asked.json_schema.json_schema)
    elif asked.type == "json_object":
        sampling.guide.json_object = True


def _max_tokens(fields: SharedFields) -> int | None:
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise wrong_field("max_completion_tokens", f" is {new}, limit {old}, as max_tokens says")
    return new if old is None else old
