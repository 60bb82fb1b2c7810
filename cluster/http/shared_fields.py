"""SharedFields: what both completion endpoints take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from legato.cluster.errors import shown
from legato.cluster.sampling_rules import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def is_whole(value: object) -> bool:
    """A JSON number without a fraction: true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _stop(value: object) -> list[str]:
    """One string or several."""
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(items)} entries, limit {MAX_STOP_STRINGS}")
    strings: list[str] = []
    for index, item in enumerate(items):
        where = f"[{index}]" if isinstance(value, list) else ""
        if not isinstance(item, str):
            raise ValueError(f"{where} is {shown(item)}, limit a string or a list of strings")
        if not item:
            raise ValueError(f"{where} is empty, limit [1, {MAX_STOP_CHARS}] chars")
        if len(item) > MAX_STOP_CHARS:
            raise ValueError(f"{where} has {len(item)} chars, limit [1, {MAX_STOP_CHARS}]")
        strings.append(item)
    return strings


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}, limit an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, limit {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**31):
            raise ValueError(f"has the key {shown(key)}, limit token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"[{key}] is {shown(bias)}, limit [-100, 100]")
        if int(key) in biases:  # "5" and "05"
            raise ValueError(f"has token {int(key)} twice, limit once")
        biases[int(key)] = max(-3e38, min(float(bias), 3e38))
    return biases


Stop = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]


class RequestModel(BaseModel):
    """Types alone are checked here; ranges are `legato.cluster.request`'s."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(RequestModel):
    """What a stream tells beside the answer."""

    include_usage: bool | None = Field(None, description="A last chunk with the request's usage.")
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk.")
    include_obfuscation: Any = Field(None, description="Ignored.")


class JsonSchemaFormat(RequestModel):
    """Of `response_format.type` json_schema."""

    name: str | None = Field(None, description="Ignored.")
    description: str | None = Field(None, description="Ignored.")
    # OpenAI's name of what it is; a model's own `schema` is a method of pydantic's.
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Ignored: the schema always holds.")


class ResponseFormat(RequestModel):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SharedFields(RequestModel):
    """Null is as good as left out."""

    model: str | None = Field(None, description="The one that is served, where it is given.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = Field(None, description="Answers to each prompt.")
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = Field(None, description="Another name of max_tokens.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: (
        Annotated[list[Int32], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    logit_bias: LogitBias | None = None
    priority: Literal["interactive", "batch"] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    parse_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="`token_ids` in every choice.")
    # What OpenAI's clients send for OpenAI's own books.
    user: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored.")
    metadata: Any = Field(None, description="Ignored.")
    service_tier: Any = Field(None, description="Ignored.")
    safety_identifier: Any = Field(None, description="Ignored.")
    prompt_cache_key: Any = Field(None, description="Ignored.")
    prompt_cache_retention: Any = Field(None, description="Ignored.")
    parallel_tool_calls: Any = Field(None, description="Ignored: there are no tools.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
