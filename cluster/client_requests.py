"""make_request: what a Python caller says, as a GenerateRequest."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from typing import Unpack

Chat = Sequence[Mapping[str, str] | generation_pb2.ChatMessage]  # {"role": …, "content": …}
# Raw text; token ids; a chat; or the whole request.
Prompt = str | Sequence[int] | Chat | generation_pb2.GenerateRequest
PRIORITIES = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "batch": common_pb2.PRIORITY_BATCH,
}
_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


class RequestSettings(TypedDict, total=False):
    """The fields of SamplingParams and GenerateRequest; what is left out has the service's default.

    Their meaning and ranges are those of the protos; the service checks them.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    guide: common_pb2.Guide
    n: int
    priority: Literal["interactive", "batch"]
    request_id: str
    parse_special_tokens: bool
    cache_salt: str


def make_request(
    prompt: Prompt, **settings: Unpack[RequestSettings]
) -> generation_pb2.GenerateRequest:
    """A request with an id: one is made where none is given, for all tries must have the same.

    Raises:
        TypeError: a setting that does not exist or is of another type.
        ValueError: a value that its field cannot hold.
    """
    if isinstance(prompt, generation_pb2.GenerateRequest):
        if settings:
            raise TypeError(f"{', '.join(settings)}: a whole request has settings of its own")
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(prompt)
    else:
        request = _with_prompt(prompt)
        for name, value in settings.items():
            if name not in RequestSettings.__annotations__:
                raise TypeError(f"{name}: there is no such setting")
            _set(request, name, value)
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request


def tokenize_request(
    prompt: str | Chat, *, add_bos: bool | None, parse_special_tokens: bool
) -> generation_pb2.TokenizeRequest:
    """Text or a chat.

    Raises:
        TypeError: it is neither.
    """
    if any(isinstance(item, int) for item in prompt):
        raise TypeError("prompt is neither text nor a chat")
    made = _with_prompt(prompt)
    request = generation_pb2.TokenizeRequest(
        add_bos=add_bos, parse_special_tokens=parse_special_tokens
    )
    if made.HasField("text"):
        request.text = made.text
    elif made.HasField("messages"):
        request.messages.CopyFrom(made.messages)
    return request


def _with_prompt(prompt: str | Sequence[int] | Chat) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))
        request.token_ids.SetInParent()
    else:
        for index, item in enumerate(cast("Chat", prompt)):
            if isinstance(item, generation_pb2.ChatMessage):
                request.messages.messages.append(item)
            elif isinstance(item, Mapping) and item.keys() == {"role", "content"}:
                request.messages.messages.add(role=item["role"], content=item["content"])
            else:
                raise TypeError(f"prompt[{index}] is no mapping of role and content, nor an id")
    return request


def _set(request: generation_pb2.GenerateRequest, name: str, value: Any) -> None:  # noqa: ANN401  # of many types
    message = request.sampling if name in _SAMPLING else request
    if name == "priority":
        if value not in PRIORITIES:
            raise ValueError(f"priority is {value!r}, limit one of {', '.join(PRIORITIES)}")
        value = PRIORITIES[value]
    elif name == "stop" and isinstance(value, str):
        value = [value]
    try:
        if isinstance(value, common_pb2.Guide):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name} is {value!r}: {error}") from error
