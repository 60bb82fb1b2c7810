"""Tokenize and Detokenize: what Generate makes of a text, and of token ids."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from text_folders import KINDS, write_folder
from text_service import TextService

from legato.cluster import tokenizing
from legato.cluster.client import AsyncClient, Client
from legato.cluster.errors import RequestError
from legato.cluster.model_limits import ModelLimits
from legato.cluster.request import parse_request
from legato.cluster.text.model_text import ModelText
from legato.cluster.tokenizing import detokenize, tokenize
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = ModelLimits(
    context_length=512,
    vocab_size=512,
    prefill_kv_tokens=512,
    decode_kv_tokens=512,
    decode_block_size=16,
)
TEXT = " two  spaces, 🙂 and être <|im_end|>"


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelText:
    return ModelText.load(write_folder(tmp_path, request.param, bos_by_processor=True))


def generated(model: ModelText, **prompt: object) -> list[int]:
    request = generation_pb2.GenerateRequest(**prompt)  # type: ignore[arg-type]  # of many types
    return list(parse_request(request, model, LIMITS).prompt_token_ids)


@pytest.mark.parametrize("special", [False, True])
def test_the_ids_are_those_of_generate(model: ModelText, special: bool) -> None:
    message = generation_pb2.ChatMessage(role="user", content=TEXT)
    messages = generation_pb2.ChatMessages(messages=[message])
    for prompt in ({"text": TEXT}, {"messages": messages}):
        request = generation_pb2.TokenizeRequest(parse_special_tokens=special, **prompt)  # type: ignore[arg-type]  # as above
        told = tokenize(request, model, LIMITS)
        assert list(told.token_ids) == generated(model, parse_special_tokens=special, **prompt)
        assert len(told.tokens) == len(told.token_ids)


def test_one_bos_or_none(model: ModelText) -> None:
    with_bos = tokenize(generation_pb2.TokenizeRequest(text="a b"), model, LIMITS)
    asked = generation_pb2.TokenizeRequest(text="a b", add_bos=True)
    assert tokenize(asked, model, LIMITS) == with_bos
    without = tokenize(generation_pb2.TokenizeRequest(text="a b", add_bos=False), model, LIMITS)
    assert list(with_bos.token_ids) == [with_bos.token_ids[0], *without.token_ids]
    assert (with_bos.tokens[0], "<s>" in without.tokens) == ("<s>", False)


def test_text_comes_back(model: ModelText) -> None:
    ids = tokenize(generation_pb2.TokenizeRequest(text="the fox"), model, LIMITS).token_ids
    request = generation_pb2.DetokenizeRequest(token_ids=ids)
    assert detokenize(request, model, LIMITS).text.strip() == "the fox"
    assert detokenize(request, model, LIMITS).text == model.decode(list(ids))


def test_nothing_is_the_text_of_no_tokens(model: ModelText) -> None:
    assert detokenize(generation_pb2.DetokenizeRequest(), model, LIMITS).text == ""


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "prompt is not set, limit exactly one of text, messages"),
        ({"text": ""}, "text is empty, limit at least 1 token"),
        ({"text": "x" * 100_000}, "text has 100000 chars, limit"),
        ({"text": "a b c d"}, "text has 5 tokens, limit 4"),
        ({"messages": generation_pb2.ChatMessages(), "add_bos": False},
         "add_bos is False, limit unset where the prompt is not text"),
    ],
)  # fmt: skip
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], sentence: str
) -> None:
    model = ModelText.load(write_folder(tmp_path, "word_piece", bos_by_processor=True))
    monkeypatch.setattr(tokenizing, "MAX_TOKENS", 4)
    with pytest.raises(RequestError) as error:
        tokenize(generation_pb2.TokenizeRequest(**fields), model, LIMITS)  # type: ignore[arg-type]  # as above
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([3, 512], "token_ids[1] is 512, limit [0, 511]"),
        ([-1], "token_ids[0] is -1, limit [0, 511]"),
        ([1] * (tokenizing.MAX_TOKENS + 1), "token_ids has 262145 entries, limit 262144"),
    ],
)
def test_ids_that_are_refused(tmp_path: Path, ids: list[int], sentence: str) -> None:
    model = ModelText.load(write_folder(tmp_path, "byte_level"))
    with pytest.raises(RequestError) as error:
        detokenize(generation_pb2.DetokenizeRequest(token_ids=ids), model, LIMITS)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.message.startswith(sentence)


def test_a_field_of_a_newer_client_is_not_ignored(tmp_path: Path) -> None:
    model = ModelText.load(write_folder(tmp_path, "byte_level"))
    newer = generation_pb2.TokenizeRequest.FromString(b"\x0a\x01x\xf8\x01\x01")  # field 31
    with pytest.raises(RequestError) as error:
        tokenize(newer, model, LIMITS)
    assert error.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.value.reason.name == "UNKNOWN_FIELD"


async def test_clients_ask_for_both(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    async with TextService(tmp_path) as service:

        def blocking() -> tuple[list[int], list[str], str, list[int]]:
            with Client(service.address) as client:
                told = client.tokenize("hé", add_bos=False)
                ids = list(told.token_ids)
                of_chat = list(client.tokenize(chat).token_ids)
                return ids, list(told.tokens), client.detokenize(ids), of_chat

        async with AsyncClient(service.address) as client:
            told = await client.tokenize("hé", add_bos=False)
            ids = list(told.token_ids)
            assert await client.detokenize(ids) == "hé"
            of_chat = list((await client.tokenize(chat)).token_ids)
            with pytest.raises(grpc.RpcError, match="text is empty"):
                await client.tokenize("")
            with pytest.raises(TypeError, match="neither text nor a chat"):
                await client.tokenize([1, 2])  # type: ignore[list-item]  # that is the test
        both = await asyncio.to_thread(blocking)
        assert both == (ids, list(told.tokens), "hé", of_chat)
        assert len(of_chat) > len(ids) > 1
