"""OpenAI's own client and real workers: answers are gRPC's, and who leaves holds nothing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
import pytest_asyncio
from local_service import Answer, LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# 100 ms or a step, in the workers; the rest is what a busy machine's clients and tests may take.
GONE_BOUND_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(folder: Path) -> AsyncIterator[LocalService]:
    options = RouterOptions(port=0, http_port=0, local_prefill_tokens=0)
    async with LocalService(folder, options=options) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_is_held(service: LocalService) -> AsyncIterator[None]:
    yield
    await service.wait_idle()


def url(service: LocalService) -> str:
    return f"http://{service.router.http_address}"


def async_client(service: LocalService) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"{url(service)}/v1", api_key="none", max_retries=0, timeout=60, http_client=http
    )


def sync_client(service: LocalService) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{url(service)}/v1", api_key="none", max_retries=0, timeout=60, http_client=http
    )


async def by_grpc(service: LocalService, message: generation_pb2.GenerateRequest) -> Answer:
    return await collect(service.generation.Generate(message, timeout=60))


def chat_message(content: str, **sampling: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401
    message = request([1], **sampling)
    message.ClearField("prompt")
    message.messages.messages.add(role="user", content=content)
    return message


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 11, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {65: 100.0}, "stop": ["AAA"]},
    {"temperature": 0.0, "stop_token_ids": [66], "logit_bias": {66: 5.0}, "min_tokens": 5},
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_a_completion_is_grpcs_token_for_token(
    service: LocalService, settings: dict[str, Any]
) -> None:
    prompt = "the same prompt on both ways"
    grpc_answer = await by_grpc(service, request(prompt, max_tokens=24, **settings))
    fields = {"model": service.model.name, "prompt": prompt, "max_tokens": 24} | settings
    async with httpx2.AsyncClient(base_url=url(service), trust_env=False, timeout=60) as http:
        whole = await http.post(TEXT, json=fields | {"return_token_ids": True})
        stream = await http.post(TEXT, json=fields | {"return_token_ids": True, "stream": True})
    assert whole.status_code == stream.status_code == 200, whole.text
    body = whole.json()
    choice = body["choices"][0]
    assert choice["token_ids"] == grpc_answer.token_ids
    assert choice["text"] == grpc_answer.text
    assert body["usage"]["completion_tokens"] == len(grpc_answer.token_ids)
    assert body["usage"]["prompt_tokens"] == grpc_answer.done.usage.prompt_tokens
    assert (choice["stop_reason"] or "") == grpc_answer.done.stop_reason
    token_ids, text = [], ""
    for event in stream.text.split("\n\n"):
        if event and event != "data: [DONE]":
            piece = json.loads(event.removeprefix("data: "))["choices"][0]
            token_ids += piece.get("token_ids", [])
            text += piece["text"]
    assert token_ids == grpc_answer.token_ids
    assert text == grpc_answer.text


async def test_the_client_in_both_its_kinds_and_streams(service: LocalService) -> None:
    content = "why is the sky blue?"
    wanted = (await by_grpc(service, chat_message(content, max_tokens=20, ignore_eos=True))).text
    fields: dict[str, Any] = {
        "model": service.model.name,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }

    def in_threads() -> tuple[str, str]:
        with sync_client(service) as client:
            whole = client.chat.completions.create(**fields)
            stream = client.chat.completions.create(stream=True, **fields)
            pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
            return whole.choices[0].message.content, "".join(pieces)

    assert await asyncio.to_thread(in_threads) == (wanted, wanted)
    async with async_client(service) as client:
        whole = await client.chat.completions.create(**fields)
        assert whole.choices[0].message.content == wanted
        assert whole.choices[0].finish_reason == "length"
        async with client.chat.completions.stream(
            **fields, stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            final = stream.current_completion_snapshot
        assert final.choices[0].message.content == wanted
        assert final.usage is not None
        assert final.usage.completion_tokens == 20


async def test_parts_system_and_developer_are_the_templates_messages(
    service: LocalService,
) -> None:
    message = chat_message("hello", max_tokens=12, ignore_eos=True)
    message.messages.messages.insert(0, generation_pb2.ChatMessage(role="system", content="brief"))
    wanted = (await by_grpc(service, message)).text
    async with async_client(service) as client:
        for role in ("system", "developer"):
            chat = await client.chat.completions.create(
                model=service.model.name,
                messages=[
                    {"role": role, "content": [{"type": "text", "text": "brief"}]},  # type: ignore[list-item,misc]  # a role of two
                    {"role": "user", "content": "hello"},
                ],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert chat.choices[0].message.content == wanted


async def test_logprobs_are_grpcs(service: LocalService) -> None:
    prompt = "how likely is it"
    answer = await by_grpc(service, request(prompt, max_tokens=8, logprobs=3, ignore_eos=True))
    async with async_client(service) as client:
        body = await client.completions.create(
            model=service.model.name,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            logprobs=3,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        logprobs = body.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == pytest.approx(
            [entry.logprob for entry in answer.logprobs], abs=1e-4
        )
        assert logprobs.top_logprobs is not None
        for top, entry in zip(logprobs.top_logprobs, answer.logprobs, strict=True):
            assert max(top.values()) == pytest.approx(entry.top[0].logprob, abs=1e-4)
            assert 1 <= len(top) <= 4
        chat = await client.chat.completions.create(
            model=service.model.name,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True},
        )
        content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
        assert content is not None
        assert len(content) == 5
        for entry in content:
            assert len(entry.top_logprobs) == 2
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)


async def test_forty_clients_at_once_get_their_own_answers(
    service: LocalService, folder: Path
) -> None:
    oracle = load_oracle(folder)
    prompts = [list(f"client {number} asks".encode()) for number in range(40)]
    async with async_client(service) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model=service.model.name,
                    prompt=prompt,
                    max_tokens=12,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                for prompt in prompts
            )
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].token_ids == greedy(oracle, prompt, 12)  # type: ignore[attr-defined]  # ours


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(service: LocalService, stream: bool) -> None:
    async with async_client(service) as client:
        asking = asyncio.create_task(
            client.completions.create(
                model=service.model.name,
                prompt=["one long answer", "and another"],
                max_tokens=1900,
                n=2,
                temperature=0,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
        )
        if stream:
            answer: Any = await asking
            await anext(aiter(answer))
            await answer.close()
        else:
            async with asyncio.timeout(20):
                while not any(  # noqa: ASYNC110  # the state is remote
                    load.running for _, load in await service.loads()
                ):
                    await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait({asking})
        began_s = time.monotonic()
        await service.wait_idle(GONE_BOUND_S)
        assert time.monotonic() - began_s < GONE_BOUND_S
        assert service.router.num_in_flight == 0


async def test_the_routers_rules_reach_the_client_as_its_own_errors(
    service: LocalService,
) -> None:
    fields: dict[str, Any] = {"model": service.model.name, "prompt": "a"}
    async with async_client(service) as client:
        for wrong, word in (
            ({"temperature": 200}, "temperature is 200, limit [0, 100]"),
            ({"max_tokens": 0}, "max_tokens is 0"),
            ({"n": 0}, "n is 0, limit [1, 128]"),
            ({"n": 129}, "n is 129"),
            ({"stop": [""]}, "stop[0] is empty"),
            ({"logit_bias": {"1": 101}}, "logit_bias[1] is 101"),
            ({"logit_bias": {"999999": 1}}, "logit_bias[999999] has token id 999999"),
            ({"prompt": [999999]}, "prompt[0] is 999999"),
            ({"prompt": ""}, "prompt is empty"),
            ({"prompt": "a" * 5000}, "prompt has 5000 tokens, limit 2047"),
            ({"extra_body": {"cache_salt": "é"}}, "cache_salt is"),
            ({"extra_body": {"top_k": -5}}, "top_k is -5"),
            ({"logprobs": 21}, "logprobs is 21, limit [0, 20]"),
        ):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.completions.create(**(fields | wrong))
            assert word in str(raised.value.body), raised.value.body
            assert raised.value.param, raised.value.body
        with pytest.raises(openai.BadRequestError, match="messages: every content is empty"):
            await client.chat.completions.create(
                model=service.model.name, messages=[{"role": "user", "content": ""}]
            )
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].role is 'pirate'"):
            await client.chat.completions.create(
                model=service.model.name,
                messages=[{"role": "pirate", "content": "a"}],  # type: ignore[list-item,misc]  # as strangers do
            )
        with pytest.raises(openai.NotFoundError, match="limit 'tiny'"):
            await client.completions.create(model="gpt-5", prompt="a")
