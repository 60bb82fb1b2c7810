"""Bodies that nobody should post: each is served, or refused in a sentence of ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from http_fuzz import CHAT, MODELS, NOT_OURS, TEXT, HttpFuzz, fuzz_http
from text_service import TextService

from legato.cluster.config import RouterOptions
from legato.cluster.errors import RequestError
from legato.cluster.http.field_reading import read_fields

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS = 1000
WRONG = (True, 5, 1.5, "5", "", [], [1.5], ["a", None], {}, {"a": 1}, [[]], [{}], 2**70, -(2**70))
NEEDED: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


def refusals(path: str, fields: dict[str, Any]) -> list[str]:
    try:
        read_fields(dict(fields), MODELS[path])
    except RequestError as error:
        return [error.message]
    return []


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_of_every_field_every_kind_of_wrong_value_is_told_in_our_words(path: str) -> None:
    told: list[tuple[str, str]] = []
    for name in MODELS[path].model_fields:
        for value in WRONG:
            cases: list[dict[str, Any]] = [{**NEEDED[path], name: value}]
            if name == "messages":
                cases += [
                    {"messages": [{"role": "user", "content": "a", inner: value}]}
                    for inner in ("role", "content", "type", "refusal", "tool_calls", "audio")
                ]
            elif name == "response_format":
                cases += [
                    {**NEEDED[path], name: {"type": "json_schema", "json_schema": inner}}
                    for inner in (value, {"schema": value}, {"schema": {}, "strict": value})
                ]
            elif name == "stream_options":
                cases.append({**NEEDED[path], "stream": True, name: {"include_usage": value}})
            told += [(name, sentence) for case in cases for sentence in refusals(path, case)]
    assert len(told) > 200
    for name, sentence in told:
        assert sentence.startswith(name), sentence
        assert "limit " in sentence or "no field" in sentence, sentence
        assert not any(word in sentence for word in (*NOT_OURS, "described")), sentence


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the request's body is empty, limit a JSON object"),
        (b"null", "the request's body is null, limit a JSON object"),
        (b"[]", "the request's body is [], limit a JSON object"),
        (b"5", "the request's body is 5, limit a JSON object"),
        (b"\xff\xfe", "the request's body is not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "a byte order mark, limit UTF-8 without one"),
        (b'{"prompt": NaN}', "has NaN or Infinity at line 1 column 12, limit finite numbers"),
        (b'{"temperature":\n-Infinity}', "has NaN or Infinity at line 2"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"stop": ["\\udc00"]}', "half a surrogate pair"),
        (b'{"a":' * 300, "nests too deep at line 1 column 1"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number of too many digits"),
        (b'{"prompt": "a", "prompt": "b"}', "has 'prompt' twice in one object, limit once"),
        (b'{"messages": [{"role": "a", "role": "b"}]}', "has 'role' twice in one object"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
        (b'{"messages": []}', "messages has 0 entries, limit at least 1"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens is '5', limit a whole number"),
        (b'{"prompt": "a", "n": 1e9}', "n is 1000000000.0, limit a whole number"),
    ],
)
async def test_what_is_wrong_with_a_body_is_told(
    tmp_path: Path, body: bytes, sentence: str
) -> None:
    path = CHAT if b"messages" in body else TEXT
    async with (
        TextService(tmp_path, RouterOptions(port=0, http_port=0)) as service,
        httpx2.AsyncClient(base_url=f"http://{service.router.http_address}") as client,
    ):
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "application/json; charset=utf-16"}, {"content-encoding": "gzip"}],
)
async def test_another_encoding_is_told(tmp_path: Path, headers: dict[str, str]) -> None:
    async with (
        TextService(tmp_path, RouterOptions(port=0, http_port=0)) as service,
        httpx2.AsyncClient(base_url=f"http://{service.router.http_address}") as client,
    ):
        answer = await client.post(
            TEXT,
            content=json.dumps({"prompt": "a"}).encode(),
            headers={"content-type": "application/json"} | headers,
        )
    assert answer.status_code == 415
    (name,) = headers
    assert answer.json()["error"]["message"].startswith(f"{name} is ")


def test_the_bodies_reach_every_field_and_repeat_with_their_seed() -> None:
    first, again, other = HttpFuzz(1), HttpFuzz(1), HttpFuzz(2)
    made = [first.next() for _ in range(2000)]
    assert made == [again.next() for _ in range(2000)]
    assert made != [other.next() for _ in range(2000)]
    together = b"".join(body for _, body, _ in made)
    for model in MODELS.values():
        for name in model.model_fields:
            assert f'"{name}"'.encode() in together


async def test_each_is_served_or_refused_with_a_reason(tmp_path: Path) -> None:
    options = RouterOptions(port=0, http_port=0, local_prefill_tokens=0)
    async with TextService(tmp_path, options) as service:
        tally = await fuzz_http(f"http://{service.router.http_address}", 7, NUM_REQUESTS)
        print(dict(tally.statuses))
        assert tally.faults == []
        assert tally.statuses.total() == NUM_REQUESTS
        assert tally.statuses[400] > NUM_REQUESTS / 4
        assert tally.statuses[200] > 20
        await service.settle()
        assert service.router.counters.failed == 0
        assert service.control.lost == []


async def test_a_fault_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("legato.cluster.http.app.read_fields", broken)
    async with TextService(tmp_path, RouterOptions(port=0, http_port=0)) as service:
        tally = await fuzz_http(f"http://{service.router.http_address}", 7, 60)
    assert any(fault.startswith("500") for fault in tally.faults)
