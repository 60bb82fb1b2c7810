"""What the HTTP endpoint answers is what gRPC answers, in OpenAI's forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_worker import FakeWorker
from http_service import CHAT, MODEL, TEXT, asked, events, http_service, texts
from router_service import ask, collect_all, expected, text_of

from legato.protos import common_pb2

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_completion_is_grpcs_answer() -> None:
    async with http_service() as service:
        response = await service.post(
            TEXT, **asked(6, prompt="hello", n=2, return_token_ids=True, stop=["q"])
        )
        others = await collect_all(service.service, ask("hello", 6, n=2, stop=["q"]))
        body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    for index, (choice, other) in enumerate(zip(body["choices"], others, strict=True)):
        assert choice["index"] == index
        assert choice["text"] == other.text
        assert choice["token_ids"] == other.token_ids
        assert choice["stop_reason"] == (other.finish.stop_reason or None)
        assert choice["finish_reason"] == ("stop" if other.finish.stop_reason else "length")
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == sum(len(other.token_ids) for other in others)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["hello"], ["hello"]),
        (["hello", "you", "there"], ["hello", "you", "there"]),
        (list(b"hello"), ["hello"]),
        ([list(b"hello"), list(b"you")], ["hello", "you"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_form_of_a_prompt(prompt: Any, prompts: list[str], stream: bool) -> None:  # noqa: ANN401
    async with http_service() as service:
        response = await service.post(TEXT, **asked(4, prompt=prompt, n=2, stream=stream))
    wanted = {
        2 * number + answer: text_of(expected(text, 4, answer))
        for number, text in enumerate(prompts)
        for answer in range(2)
    }
    if stream:
        assert texts(events(response.text)) == wanted
        return
    body = response.json()
    assert {choice["index"]: choice["text"] for choice in body["choices"]} == wanted
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 8 * len(prompts)


async def test_a_chat_and_its_stream_are_the_same_answer() -> None:
    async with http_service() as service:
        whole = (await service.post(CHAT, **asked(7, messages=MESSAGES))).json()
        stream = await service.post(CHAT, **asked(7, messages=MESSAGES, stream=True))
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": text_of(expected("hello", 7)),
        "refusal": None,
    }
    assert stream.headers["content-type"].startswith("text/event-stream")
    chunks = events(stream.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": message["content"][0]}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks)
    assert texts(chunks) == {0: message["content"]}


async def test_usage_within_and_after_a_stream() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with http_service() as service:
        plain = await service.post(
            TEXT,
            **asked(3, prompt="hello", stream=True, stream_options={"include_usage": True}),
        )
        continuous = await service.post(
            TEXT, **asked(3, prompt="hello", stream=True, stream_options=options)
        )
    *others, last = events(plain.text)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == 8
    *others, last = events(continuous.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in others]
    assert counts == [1, 2, 3, 3]  # the last of them has the finish reason
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in others)
    assert last["usage"]["total_tokens"] == 8


async def test_cached_tokens_are_told() -> None:
    prefill = FakeWorker("prefill")
    prefill.cached_tokens = 3
    async with http_service(prefill) as service:
        body = (await service.post(TEXT, **asked(3, prompt=["hello", "there"], n=2))).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_logprobs_of_text_are_four_lists() -> None:
    async with http_service() as service:
        body = (await service.post(TEXT, **asked(4, prompt="hello", logprobs=0))).json()
        stream = await service.post(TEXT, **asked(4, prompt="hello", logprobs=0, stream=True))
    text = body["choices"][0]["text"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": list(text),
        "token_logprobs": [0.0, -1.0, -2.0, -3.0],
        "top_logprobs": [{char: -float(index)} for index, char in enumerate(text)],
        "text_offset": [0, 1, 2, 3],
    }
    pieces = [chunk["choices"][0]["logprobs"] for chunk in events(stream.text)]
    joined = {
        name: [item for piece in pieces if piece for item in piece[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert joined == body["choices"][0]["logprobs"]


async def test_logprobs_of_a_chat_are_an_entry_a_token() -> None:
    async with http_service() as service:
        body = (await service.post(CHAT, **asked(2, messages=MESSAGES, logprobs=True))).json()
    content = body["choices"][0]["logprobs"]["content"]
    first, second = text_of(expected("hello", 2))
    assert content == [
        {"token": first, "logprob": 0.0, "bytes": [ord(first)], "top_logprobs": []},
        {"token": second, "logprob": -1.0, "bytes": [ord(second)], "top_logprobs": []},
    ]


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_every_choice(prompt: Any, stream: bool) -> None:  # noqa: ANN401
    async with http_service() as service:
        response = await service.post(
            TEXT, **asked(3, prompt=prompt, n=2, echo=True, stream=stream)
        )
    wanted = {index: "hello" + text_of(expected("hello", 3, index)) for index in range(2)}
    if stream:
        assert texts(events(response.text)) == wanted
    else:
        choices = response.json()["choices"]
        assert {choice["index"]: choice["text"] for choice in choices} == wanted


async def test_contents_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts, "name": "me", "type": "text"}]
    async with http_service() as service:
        body = (await service.post(CHAT, **asked(4, messages=messages))).json()
    assert body["choices"][0]["message"]["content"] == text_of(expected("hello", 4))


async def test_the_settings_reach_the_workers() -> None:
    async with http_service() as service:
        fields = asked(
            5,
            prompt="hello",
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            ignore_eos=True,
            min_tokens=2,
            stop_token_ids=[5, 6],
            logit_bias={"3": -100, "4": 1.5},
            priority="batch",
            cache_salt="tenant",
            user="somebody",
            metadata={"any": ["thing"]},
            store=True,
            suffix=None,
            response_format={"type": "text"},
            tools=None,
        )
        assert (await service.post(TEXT, **fields)).status_code == 200
        sampling = service.service.prefills[0].prefills[0].sampling
        reserve = service.service.decodes[0].reserves[0]
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(sampling, name) == pytest.approx(fields[name])
    assert sampling.presence_penalty == 0.25
    assert sampling.frequency_penalty == -0.5
    assert sampling.ignore_eos
    assert sampling.min_tokens == 2
    assert list(sampling.stop_token_ids) == [5, 6]
    assert dict(sampling.logit_bias) == {3: -100, 4: 1.5}
    assert reserve.priority == common_pb2.PRIORITY_BATCH


async def test_what_clients_of_load_send_is_taken() -> None:
    # As vllm bench serve, guidellm, aiperf and lm-eval write their requests.
    bodies = [
        (
            TEXT,
            {
                "prompt": "hello",
                "temperature": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": 3,
                "logprobs": None,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
                "max_completion_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "ignore_eos": True,
                "min_tokens": 3,
            },
        ),
        (
            TEXT,
            {
                "prompt": "hello",
                "max_tokens": 3,
                "max_completion_tokens": 3,
                "stop": None,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "name": "text", "content": "hello"}],
                "max_completion_tokens": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            TEXT,
            {
                "prompt": [list(b"hello"), list(b"you")],
                "max_tokens": 3,
                "temperature": 0,
                "stop": ["\n\n", "Question:"],
                "seed": 1234,
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hello", "type": "text"}],
                "max_tokens": 3,
                "temperature": 0,
                "stop": ["\n\n"],
                "seed": 1234,
            },
        ),
    ]
    async with http_service() as service:
        for path, body in bodies:
            response = await service.post(path, model=MODEL, **body)
            assert response.status_code == 200, response.text
            if body.get("stream"):
                assert events(response.text)[-1]["usage"]["completion_tokens"] == 3


async def test_openais_own_client() -> None:
    async with http_service() as service:
        client, wanted = service.openai, text_of(expected("hello", 5))
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        text = await client.completions.create(prompt="hello", **asked(5))
        assert text.choices[0].text == wanted
        chat = await client.chat.completions.create(messages=MESSAGES, **asked(5))  # type: ignore[call-overload]  # dicts
        assert chat.choices[0].message.content == wanted
        assert chat.usage.total_tokens == 10
        stream = await client.chat.completions.create(  # type: ignore[call-overload]  # dicts
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked(5)
        )
        pieces, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == wanted
        assert usage is not None
        assert usage.completion_tokens == 5


async def test_what_asks_for_nothing_is_taken() -> None:
    answered = {"role": "assistant", "content": "yes", "tool_calls": [], "annotations": []}
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "auto",
        "modalities": ["text"],
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "chat_template_kwargs": {},
        "add_generation_prompt": True,
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "safety_identifier": "somebody",
    }
    async with http_service() as service:
        messages = [*MESSAGES, answered, *MESSAGES]
        answer = await service.post(CHAT, **asked(2, messages=messages, **nothing))
        assert answer.status_code == 200, answer.text
        answer = await service.post(TEXT, **asked(2, prompt="hello", suffix=""))
        assert answer.status_code == 200, answer.text


async def test_an_answers_own_words_may_be_sent_back() -> None:
    async with http_service() as service:
        chat = await service.openai.chat.completions.create(messages=MESSAGES, **asked(5))  # type: ignore[call-overload]  # dicts
        messages = [*MESSAGES, chat.choices[0].message.model_dump(), *MESSAGES]
        again = await service.openai.chat.completions.create(messages=messages, **asked(5))  # type: ignore[call-overload]  # dicts
        assert again.usage.prompt_tokens == 15


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_response_format_is_a_guide(path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    of_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    prompt: dict[str, Any] = {"prompt": "hello"} if path == TEXT else {"messages": MESSAGES}
    async with http_service() as service:
        for asked_format in (of_schema, {"type": "json_object"}):
            answer = await service.post(path, **asked(3, **prompt, response_format=asked_format))
            assert answer.status_code == 200, answer.text
        guides = [call.sampling.guide for call in service.service.prefills[0].prefills]
    assert json.loads(guides[0].json_schema) == schema
    assert guides[1].json_object


async def test_echoes_of_one_request_are_bounded_together() -> None:
    decode = FakeWorker("decode", total_blocks=40_000)
    async with http_service(FakeWorker("prefill", total_blocks=40_000), decode) as service:
        fields = asked(1, prompt=["x" * 17_000] * 2, n=2, echo=True)
        response = await service.post(TEXT, **fields)
        assert response.status_code == 200
        status, error = await service.refused(TEXT, **(fields | {"n": 127}))
        assert (status, error["param"]) == (400, "n")
        assert (
            "which with echo makes 4318000 tokens and logprobs of prompts, limit 4194304"
            in (error["message"])
        )
