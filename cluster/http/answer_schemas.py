"""Schemas of what the HTTP endpoint answers, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

_TEXT, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _object(optional: dict[str, Any] | None = None, **required: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_FINISH_REASON = {"enum": ["stop", "length"]}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _or_null(_list(_COUNT))}
_CHAT_LOGPROBS = _object(content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))))
_TEXT_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_or_null(_NUMBER)),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_list(_COUNT),
)
_MESSAGE = _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})


def _answer(kind: str, logprobs: dict[str, Any], **text: object) -> dict[str, Any]:
    choice = _object(
        {"token_ids": _list(_COUNT)},  # with `return_token_ids`
        index=_COUNT,
        **text,
        logprobs=_or_null(logprobs),
        finish_reason=_FINISH_REASON,
        stop_reason=_or_null(_TEXT),
    )
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices=_list(choice),
        usage=_USAGE,
    )


_MODEL = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len=_or_null(_COUNT),
)
_NAMED = {name: _or_null(_TEXT) for name in ("param", "code")}
SCHEMAS: dict[str, dict[str, Any]] = {
    "Completion": _answer("text_completion", _TEXT_LOGPROBS, text=_TEXT),
    "ChatCompletion": _answer("chat.completion", _CHAT_LOGPROBS, message=_MESSAGE),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "Health": _object({"reason": _TEXT}, status=_TEXT, grpc_port=_COUNT),
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, **_NAMED)),
}
