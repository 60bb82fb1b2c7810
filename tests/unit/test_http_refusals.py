"""What the HTTP endpoint refuses: by name, at once, in OpenAI's shape, and without growing."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from http_service import CHAT, MODEL, TEXT, asked, http_service

from legato.cluster.errors import RequestError, unavailable
from legato.cluster.gateway import MAX_REQUEST_BYTES
from legato.cluster.http.completion_fields import CompletionFields
from legato.cluster.http.error_response import error_object, error_response
from legato.cluster.http.field_names import FieldNames
from legato.cluster.http.field_reading import read_fields

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"foo": 1}, "foo", "foo is no field of this request"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"guided_json": {}}, "guided_json", "did you mean response_format?"),
        ({"stop_sequences": ["a"]}, "stop_sequences", "did you mean stop?"),
        ({"max_output_tokens": 1}, "max_output_tokens", "did you mean max_tokens?"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot', limit a number"),
        ({"temperature": True}, "temperature", "temperature is True"),
        ({"n": 1.5}, "n", "n is 1.5"),
        ({"n": 2**40}, "n", "n is 1099511627776"),
        ({"n": 2**31 - 1}, "n", "n is 2147483647, limit [1, 128]"),
        ({"n": 129}, "n", "n is 129, limit [1, 128]"),
        ({"n": 0}, "n", "n is 0, limit [1, 128]"),
        ({"seed": 2**70}, "seed", "seed is 1180591620717411303424"),
        ({"stop": ["a"] * 17}, "stop", "stop has 17 entries, limit 16"),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1] is 1"),
        ({"stop": 3}, "stop", "stop is 3"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "stop_token_ids has 65 entries, limit 64"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "stop_token_ids[0] is 'a'"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has the key 'a'"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[1]", "logit_bias[1] is 'a', limit [-100, 100]"),
        (
            {"logit_bias": {"5": 1, "05": 2}},
            "logit_bias",
            "logit_bias has token 5 twice, limit once",
        ),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1]"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type is 'x",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is not set",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
            "response_format.json_schema is set",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is 3",
        ),
        ({"response_format": "text"}, "response_format", "response_format is 'text'"),
        ({"priority": "urgent"}, "priority", "priority is 'urgent'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "limit requests with"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "is no field"),
        ({"max_completion_tokens": 9}, "max_completion_tokens", "limit 4, as max_tokens says"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, sentence: str) -> None:
    async with http_service() as service:
        for path, prompt in ((TEXT, {"prompt": "hello"}), (CHAT, {"messages": USER})):
            status, error = await service.refused(path, **(asked(4) | prompt | fields))
            assert status == 400
            assert sentence in error["message"]
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (TEXT, {"best_of": 2, "prompt": "a"}, "best_of is 2"),
        (TEXT, {"suffix": "b", "prompt": "a"}, "suffix is not served"),
        (TEXT, {}, "prompt is not set"),
        (TEXT, {"prompt": None}, "prompt is None"),
        (TEXT, {"prompt": {}}, "prompt is {}"),
        (TEXT, {"prompt": []}, "prompt is empty"),
        (TEXT, {"prompt": ["a", 1]}, "prompt[1] is 1"),
        (TEXT, {"prompt": [1, "a"]}, "prompt[1] is 'a', limit token ids"),
        (TEXT, {"prompt": [[1], [True]]}, "prompt[1][0] is True, limit token ids"),
        (TEXT, {"prompt": [2**31]}, "prompt[0] is 2147483648"),
        (TEXT, {"prompt": [[[1]]]}, "prompt[0][0] is [1]"),
        (TEXT, {"prompt": ["a"] * 257}, "prompt has 257 prompts, limit 256"),
        (TEXT, {"prompt": ["a"] * 3, "n": 86}, "n is 86, limit 85: prompt has 3, and a request"),
        (TEXT, {"prompt": [[1]] * 256, "n": 128}, "n is 128, limit 1: prompt has 256, and"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs is True"),
        (CHAT, {}, "messages is not set"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": USER * 1025}, "messages has 1025 entries, limit 1024"),
        (CHAT, {"messages": ["a"]}, "messages[0] is 'a'"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role is not set"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content is 1"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type is 'image_url', limit 'text'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[0].content[0] has the field 'b'",
        ),
        (CHAT, {"messages": [{**USER[0], "tool_calls": [1]}]}, "messages[0].tool_calls is [1]"),
        (CHAT, {"messages": [{**USER[0], "colour": 1}]}, "messages[0].colour is no field"),
        (CHAT, {"messages": USER, "tools": [{}]}, "tools is not served"),
        (CHAT, {"messages": USER, "tools": [{}], "tool_choice": "auto"}, "tools is not served"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice is not served"),
        (CHAT, {"messages": USER, "use_beam_search": True}, "use_beam_search is not served"),
        (TEXT, {"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens is not served"),
        (
            TEXT,
            {"prompt": "a", "include_stop_str_in_output": True},
            "include_stop_str_in_output is not served",
        ),
        (CHAT, {"messages": USER, "modalities": ["text", "audio"]}, "modalities is not served"),
        (CHAT, {"messages": [{**USER[0], "annotations": [{}]}]}, "messages[0].annotations is [{}]"),
        (CHAT, {"messages": USER, "echo": True}, "echo is no field"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs is 2, limit requests with"),
    ],
)
async def test_a_wrong_prompt_is_named(path: str, fields: dict[str, Any], sentence: str) -> None:
    async with http_service() as service:
        status, error = await service.refused(path, model=MODEL, **fields)
    assert status == 400
    assert sentence in error["message"], error


@pytest.mark.parametrize("name", ["allowed_token_ids", "input", "instructions"])
def test_a_field_that_does_another_thing_is_not_proposed(name: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_fields({"prompt": "a", name: [1]}, CompletionFields)
    assert raised.value.message == f"{name} is no field of this request"


async def test_the_routers_own_rules_speak_of_the_same_fields() -> None:
    async with http_service() as service:
        # The fake text side checks one thing: see fake_parse.
        status, error = await service.refused(TEXT, **asked(5000, prompt="hello"))
        assert (status, error["code"]) == (400, "invalid_field")
    names = FieldNames("prompt")
    named = {
        "sampling.top_k is -1, limit [0, 9] (0 is off)": ("top_k is -1, limit", "top_k"),
        "text is empty, limit at least 1 token": ("prompt is empty", "prompt"),
        "token_ids[3] is 999, limit [0, 319]": ("prompt[3] is 999", "prompt[3]"),
        "prompt has 900 tokens, limit 511": ("prompt has 900", "prompt"),
        "messages[2].role is 'x', limit one of a, b": ("messages[2].role is", "messages[2].role"),
        "The model gave up": ("The model gave up", None),
    }
    for message, (beginning, param) in named.items():
        with pytest.raises(RequestError) as raised, names.used():
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)
        told = error_object(raised.value)["error"]
        assert str(told["message"]).startswith(beginning)
        assert told["param"] == param


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("UNIMPLEMENTED", 400),
        ("FAILED_PRECONDITION", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 409),
        ("ABORTED", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("INTERNAL", 500),
        ("UNKNOWN", 500),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
    ],
)
def test_every_status_has_its_number(code: str, status: int) -> None:
    error = RequestError(grpc.StatusCode[code], "something")
    response = error_response(error)
    assert response.status_code == status
    assert json.loads(bytes(response.body))["error"].keys() == {"message", "type", "param", "code"}


def test_when_to_ask_again_is_told_in_both_ways() -> None:
    error = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_ms=1500)
    headers = error_response(error).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
    assert "x-should-retry" not in headers
    assert "retry-after" in error_response(unavailable("none")).headers
    final = RequestError(grpc.StatusCode.UNAVAILABLE, "it kills workers", is_final=True)
    assert error_response(final).headers["x-should-retry"] == "false"


async def test_routes_models_and_media_types() -> None:
    async with http_service() as service:
        response = await service.http.get("/v2/completions")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
        response = await service.http.get(TEXT)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert response.json()["error"]["code"] == "method_not_allowed"
        response = await service.http.get("/v1/models/other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        fields = asked(4, prompt="a") | {"model": "other"}
        status, error = await service.refused(TEXT, **fields)
        assert (status, error["code"]) == (404, "model_not_found")
        assert "limit 'fake-model'" in error["message"]
        # What a page of another origin may send without asking first.
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await service.http.post(
                TEXT, content=json.dumps(asked(4, prompt="a")), headers={"content-type": kind}
            )
            assert response.status_code == 415
        for path in ("/docs", "/redoc"):
            assert (await service.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "a"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"messages":' + b'{"a":' * 100_000,
        b'{"response_format":{"a":' + b'{"a":' * 300 + b"1" + b"}" * 302,
    ],
)
async def test_what_is_no_request_is_the_callers_fault(body: bytes) -> None:
    async with http_service() as service:
        for path in (TEXT, CHAT):
            response = await service.http.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_large_bodies_are_refused_at_once_and_kept_nowhere() -> None:
    process = psutil.Process()
    prompts = json.dumps(asked(1, prompt=["a"] * 100_000)).encode()
    stops = json.dumps(asked(1, prompt="a", stop=["s"] * 100_000)).encode()
    mixed = json.dumps(asked(1, prompt=[1] * 1_000_000 + ["a"])).encode()
    biases = json.dumps(asked(1, prompt="a", logit_bias=dict.fromkeys(range(100_000), 1))).encode()
    few_biases = biases[: biases.index(b'"50000"') - 2] + b"}}"
    quotes = b'{"prompt":"' + b'\\"[' * 1_000_000
    nested = b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}"
    async with http_service() as service:

        async def endless() -> Any:  # noqa: ANN401  # an iterator of bytes
            for _ in range(100):
                yield b" " * (1 << 20)

        await service.http.post(TEXT, content=stops, headers=JSON)  # what is imported late
        before = process.memory_info().rss
        for body, status, word in (
            (prompts, 400, "100000 prompts"),
            (stops, 400, "100000 entries"),
            (mixed, 400, "prompt[1000000]"),
            (biases, 400, "members of objects, limit 60000"),
            (few_biases, 400, "50000 entries"),
            (nested, 400, "lists and objects, limit 20000"),
            (quotes, 400, "lists and objects, limit 20000"),
            (b"x" * (MAX_REQUEST_BYTES + 1), 413, f"limit {MAX_REQUEST_BYTES}"),
            (endless(), 413, f"limit {MAX_REQUEST_BYTES}"),
        ):
            began_s = time.monotonic()
            response = await service.http.post(TEXT, content=body, headers=JSON)
            took_s = time.monotonic() - began_s
            assert response.status_code == status
            assert word in response.json()["error"]["message"]
            assert took_s < 5, word  # the goal is one second, of a machine that has nothing else
        assert process.memory_info().rss - before < 256 << 20
        assert (await service.post(TEXT, **asked(2, prompt="hello"))).status_code == 200


async def test_texts_may_have_as_many_brackets_as_they_like() -> None:
    text = 'a["b\\"] = {c: [d:e]}' * 20
    messages = [{"role": "user", "content": text * 40}] * 60
    assert json.dumps(messages).count("[") > 20_000
    assert json.dumps(messages).count(":") > 60_000
    async with http_service() as service:
        response = await service.post(CHAT, **asked(2, messages=messages))
    assert response.status_code == 400  # of the fake router: longer than its workers hold
    assert "more than the largest decode worker holds" in response.json()["error"]["message"]


async def test_a_length_that_is_too_large_is_refused_before_the_body_comes() -> None:
    async with http_service() as service:
        host, port = service.service.router.http_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            f"content-length: 100000000\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readline(), 5)
        assert head.split()[1] == b"413"
        writer.close()


async def test_headers_have_limits_too() -> None:
    async with http_service() as service:
        for name, value in (
            ("x-request-id", "a" * 101),
            ("x-request-id", "a b"),
            ("x-request-timeout-s", "soon"),
            ("x-request-timeout-s", "0"),
            ("x-request-timeout-s", "nan"),
            ("x-request-timeout-s", "1e300"),
        ):
            response = await service.http.post(
                TEXT, json=asked(2, prompt="a"), headers={name: value}
            )
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(f"{name} is {value[:5]!r}"[:-1])


async def test_a_slash_more_is_another_path() -> None:
    async with http_service() as service:
        for path in (f"{TEXT}/", f"{CHAT}/", "/health/", "/metrics/"):
            response = await service.http.get(path, follow_redirects=False)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
            response = await service.http.post(path, json={}, follow_redirects=False)
            assert response.status_code == 404
        response = await service.http.get("/v1/models/")
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
async def test_what_is_no_http_is_told_so_in_json(sent: bytes) -> None:
    async with http_service() as service:
        host, port = service.service.router.http_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent + b"\r\n\r\n")
        told = await asyncio.wait_for(reader.read(), 5)  # to the connection's end
        writer.close()
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["param"]) == ("malformed_request", None)


async def test_the_page_of_the_manual_has_the_routes_that_there_are() -> None:
    table = (Path(__file__).parents[2] / "docs/http.md").read_text().split("## Routes")[1]
    documented = set(re.findall(r"`((?:GET|POST) /[^`]*)`", table.split("\n\n")[1]))
    async with http_service() as service:
        paths = (await service.http.get("/openapi.json")).json()["paths"]
    served = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    assert documented == served | {"GET /openapi.json"}
