"""CompletionFields: the body of POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from legato.cluster.errors import shown
from legato.cluster.http.shared_fields import Int32, SharedFields, is_whole

MAX_PROMPTS = 256  # of one request; each is a request of its own to the workers
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_KINDS = "a string, a list of strings, token ids, or a list of lists of token ids"

Prompt = str | list[int]


@dataclass(frozen=True)
class Prompts:
    """`several`: they came as a list, if only of one."""

    items: list[Prompt]
    several: bool

    def __len__(self) -> int:
        return len(self.items)


def _prompts(value: object) -> Prompts:
    """Of any of the four forms; the first item decides which one it is."""
    if isinstance(value, str):
        return Prompts([value], several=False)
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, limit {_KINDS}")
    if not value:
        raise ValueError("is empty, limit at least 1 token")
    if is_whole(value[0]):
        _check_ids(value, "")
        return Prompts([value], several=False)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, limit {MAX_PROMPTS}")
    kind = type(value[0])
    for index, item in enumerate(value):
        if not isinstance(item, str | list) or type(item) is not kind:
            raise ValueError(f"[{index}] is {shown(item)}, limit {_KINDS}")
        if isinstance(item, list):
            _check_ids(item, f"[{index}]")
    return Prompts(value, several=True)


def _check_ids(ids: list[object], where: str) -> None:
    for index, token_id in enumerate(ids):
        if not (is_whole(token_id) and -(2**31) <= token_id < 2**31):  # type: ignore[operator]  # it is an int
            raise ValueError(f"{where}[{index}] is {shown(token_id)}, limit token ids")


class CompletionFields(SharedFields):
    """Raw text or tokens, completed as they stand."""

    prompt: Annotated[
        Prompts,
        PlainValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": _TEXT,
                        "minItems": 1,
                        "maxItems": MAX_PROMPTS,
                    },
                    _IDS,
                    {
                        "type": "array",
                        "items": _IDS,
                        "minItems": 1,
                        "maxItems": MAX_PROMPTS,
                    },
                ]
            }
        ),
    ] = Field(description="Several are as many requests, whose choices follow each other.")
    echo: bool | None = Field(None, description="Every choice begins with the prompt.")
    logprobs: Int32 | None = Field(
        None,
        description="Of each token and so many likeliest ones; with echo, of the prompt's too.",
    )
    best_of: Literal[1] | None = Field(None, description="Not served.")
