"""ChatFields: the body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from legato.cluster.errors import shown
from legato.cluster.http.shared_fields import Int32, RequestModel, SharedFields
from legato.cluster.prompt_ids import MAX_MESSAGES

MAX_PARTS = 1024  # of one message's content


def _content(value: object) -> str:
    """Text, or parts of text, which are joined as they stand; null is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, limit a string or a list of parts of type text")
    if len(value) > MAX_PARTS:
        raise ValueError(f"has {len(value)} parts, limit {MAX_PARTS}")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise ValueError(f"[{index}] is {shown(part)}, limit a part of type text")
        if part.get("type") != "text":
            raise ValueError(f"[{index}].type is {shown(part.get('type'))}, limit 'text'")
        text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"[{index}].text is {shown(text)}, limit a string")
        unknown = next((name for name in part if name not in ("type", "text")), None)
        if unknown is not None:
            raise ValueError(f"[{index}] has the field {shown(unknown)}, limit type and text")
        texts.append(text)
    return "".join(texts)


def _nothing(value: object) -> None:
    if value is not None and value != []:
        raise ValueError(f"is {shown(value)}, limit null or []: it is not served")


Nothing = Annotated[
    None,
    PlainValidator(_nothing),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}),
]


class Message(RequestModel):
    """One turn of a chat."""

    role: str
    content: Annotated[
        str,
        PlainValidator(_content),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                            "required": ["type", "text"],
                            "additionalProperties": False,
                        },
                        "maxItems": MAX_PARTS,
                    },
                    {"type": "null"},
                ]
            }
        ),
    ]
    name: Any = Field(None, description="Ignored: chat templates have no place for it.")
    # As lm-eval marks its messages.
    type: Literal["text"] | None = None
    # What answers of OpenAI's SDK have when they are sent back.
    refusal: None = None
    tool_calls: Nothing = None
    function_call: None = None
    audio: None = None
    annotations: Nothing = None


class ChatFields(SharedFields):
    """A chat, rendered with the model's template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="So many likeliest tokens in each place.")
