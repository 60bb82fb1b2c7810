"""Errors over HTTP speak of the body's own fields: in `param`, and in the sentence."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from http_fuzz import CHAT, MODELS, TEXT
from text_service import TextService

from legato.cluster.config import RouterOptions
from legato.cluster.http.chat_fields import Message
from legato.cluster.http.field_reading import NOT_SERVED
from legato.cluster.http.shared_fields import JsonSchemaFormat, ResponseFormat
from legato.cluster.http.shared_fields import StreamOptions as StreamFields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NUMBERS = (True, "5", 1.5, -1, -3, 0, 21, 101, 513, 2**31 - 1, 2**63 - 1, 2**70, [], {})
WRONG = (*NUMBERS, "", "x" * 5000, "\n", [""], ["a", ""], ["a"] * 300, [5000], [-1], [[]], [[5000]],
         ["a", 5], {"a": 1}, {"5": 101}, {"5000": 1}, {"5": "a"})  # fmt: skip
WORDS = re.compile(r"sampling|guide\.|token_ids\[|prompt_logprobs|request_id|\btext\b|resume")


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


OWN: dict[str, tuple[Any, ...]] = {
    "response_format": (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "text", "json_schema": {"schema": {}}},
        json_schema(5),
        json_schema({"type": 5}),
        json_schema({"colour": 5}),
        json_schema({"$ref": "#/$defs/none"}),
        json_schema({"enum": ["x" * 100_000]}),
        json_schema({"type": "string", "pattern": "("}),
    ),
    "messages": (
        [{"role": "user", "content": ""}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": "a" * 600}],
        [{"role": "user", "content": "a" * 100_000}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "colour": 1}],
    ),
    "prompt": ("a" * 600, "a" * 100_000, [1] * 600, ["a", "a" * 600], [[1], [1] * 600]),
}
GOOD: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


class Asker:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def error(self, path: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """None of a request that is served."""
        answer = await self.http.post(path, json=fields)
        if answer.status_code == 200:
            return None
        error: dict[str, Any] = json.loads(answer.text)["error"]
        assert answer.status_code in (400, 404), error
        return error


@pytest.fixture
async def asker(tmp_path: Path) -> AsyncIterator[Asker]:
    async with (
        TextService(tmp_path, RouterOptions(port=0, http_port=0)) as service,
        httpx2.AsyncClient(base_url=f"http://{service.router.http_address}") as http,
    ):
        yield Asker(http)


def is_of_body(path: str, param: str) -> bool:
    """Whether a body of that route may have it."""
    names = [re.sub(r"\[\d+\]", "", name) for name in param.split(".")]
    inner = {"messages": Message, "stream_options": StreamFields, "response_format": ResponseFormat}
    if names[0] not in MODELS[path].model_fields and names[0] not in NOT_SERVED:
        return False
    if len(names) == 1:
        return True
    if names[:2] == ["response_format", "json_schema"] and len(names) == 3:
        known = JsonSchemaFormat.model_fields.items()
        return names[2] in {field.alias or name for name, field in known}
    return names[1] in inner[names[0]].model_fields


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_whatever_is_wrong_a_field_of_the_body_is_named(asker: Asker, path: str) -> None:
    num_refused = 0
    for name in MODELS[path].model_fields:
        for value in (*WRONG, *OWN.get(name, ())):
            if name == "n" and value == 101:
                continue  # a hundred answers are served
            fields = {**GOOD[path], name: value}
            if name == "max_completion_tokens":
                del fields["max_tokens"]
            elif name == "stream_options":
                fields["stream"] = True
            elif name == "top_logprobs":
                fields["logprobs"] = True
            error = await asker.error(path, fields)
            if error is None:
                continue
            num_refused += 1
            param, message = error["param"], error["message"]
            assert param is not None, error
            # Where it is at fault itself, it is the one; `min_tokens` may be at odds with another.
            assert re.split(r"[.\[]", param)[0] == name, (value, error)
            if "is no field of this request" not in message:
                assert is_of_body(path, param), error
                assert message.startswith(param), error
            assert not WORDS.search(re.sub(r"'[^']*'", "", message.removeprefix(param))) or (
                name in ("prompt", "messages", "response_format", "type")
            ), error
    assert num_refused > 300


@pytest.mark.parametrize(
    ("path", "fields", "param", "sentence"),
    [
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty, limit at least 1 token"),
        (TEXT, {"prompt": ""}, "prompt", "prompt is empty, limit"),
        (TEXT, {"prompt": [[1], []]}, "prompt[1]", "prompt[1] is empty"),
        (TEXT, {"prompt": [[1], [2, 999]]}, "prompt[1][1]", "prompt[1][1] is 999, limit [0, 319]"),
        (TEXT, {"prompt": [2, 999]}, "prompt[1]", "prompt[1] is 999, limit [0, 319]"),
        (TEXT, {"prompt": ["a", "a" * 600]}, "prompt[1]", "prompt[1] has 600 tokens, limit 511"),
        (TEXT, {"logprobs": 21}, "logprobs", "logprobs is 21, limit [0, 20]"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "limit [1, 2147483647], or 0 with echo and logpr"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0, limit [1, 2147483647]"),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens is 0, limit [1, 2147483647]",
        ),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
            "min_tokens is 4, limit [0, 3] (max_completion_tokens)",
        ),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21, limit"),
        (
            CHAT,
            {"response_format": json_schema({"type": 5})},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: ",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 600}]},
            "messages",
            "messages has 6",
        ),
        (TEXT, {"stop": ""}, "stop", "stop is empty, limit [1, 1024] chars"),
        (TEXT, {"stop": ["a", ""]}, "stop[1]", "stop[1] is empty, limit [1, 1024] chars"),
        (TEXT, {"logit_bias": {"999": 1}}, "logit_bias[999]", "logit_bias[999] has token id 999"),
        (TEXT, {"logit_bias": {"9": 101}}, "logit_bias[9]", "logit_bias[9] is 101, limit [-100,"),
        (TEXT, {"Colour": 1}, "Colour", "Colour is no field of this request"),
        (TEXT, {"schön?": 1}, "schön?", "'schön?' is no field of this request"),
        (CHAT, {"tools": [{}]}, "tools", "tools is not served"),
        (TEXT, {"model": "other"}, "model", "model is 'other', limit 'fake'"),
        (TEXT, {"n": 0}, "n", "n is 0, limit [1, 128]"),
        (
            CHAT,
            {
                "max_tokens": None,
                "max_completion_tokens": 3,
                "response_format": json_schema({"max_tokens": 1}),
            },
            "response_format.json_schema.schema",
            "has the keyword 'max_tokens', which is not understood",
        ),
    ],
)
async def test_the_field_is_the_one_that_was_sent(
    asker: Asker, path: str, fields: dict[str, Any], param: str, sentence: str
) -> None:
    error = await asker.error(path, {**GOOD[path], **fields})
    assert error is not None
    assert sentence in error["message"]
    assert error["param"] == param
    if sentence.endswith("[1, 2147483647]"):
        assert error["message"].endswith(sentence)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_context_that_is_too_short_has_openais_code(asker: Asker, path: str) -> None:
    long = {
        TEXT: {"prompt": "a" * 600},
        CHAT: {"messages": [{"role": "user", "content": "a" * 600}]},
    }
    error = await asker.error(path, long[path])
    assert error is not None
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"


async def test_where_no_field_is_at_fault_none_is_named(asker: Asker) -> None:
    for body in (b"", b"null", b"[]", b"{"):
        answer = await asker.http.post(
            TEXT, content=body, headers={"content-type": "application/json"}
        )
        assert answer.json()["error"]["param"] is None
    for name in ("x-request-id", "x-request-timeout-s"):
        answer = await asker.http.post(TEXT, json=GOOD[TEXT], headers={name: "a b"})
        assert answer.json()["error"]["param"] is None
