"""Requests against what context and pools have room for."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from request_fields import LIMITS, limits, parse, request
from tiny_models import write_byte_tokenizer

from legato.cluster.errors import RequestError
from legato.cluster.request import parse_request
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2
from legato.worker.kv.block_pool import BlockPool
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.claim import AdmissionRule, NeverFitsError, Newcomer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


POOLS = limits(context_length=512, prefill_kv_tokens=400, decode_kv_tokens=256)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "wanted"),
    [
        (300, 1, 1),  # never leaves prefill
        (300, None, "prompt has 300 tokens, limit 255: the KV pool of the largest decode worker"),
        (400, 1, 1),
        (401, 1, "prompt has 401 tokens, limit 400: the KV pool of the largest prefill worker"),
        (300, 2, "prompt of 300 tokens + max_tokens 2 - 1 needs 301 KV tokens, limit 256: the KV"),
        (250, 100, "prompt of 250 tokens + max_tokens 100 - 1 needs 349 KV tokens, limit 256"),
        (250, 7, 7),
        (250, 8, "prompt of 250 tokens + max_tokens 8 - 1 needs 257 KV tokens, limit 256"),
        (250, None, 7),
        (256, 1, 1),
        (256, 2, "prompt of 256 tokens + max_tokens 2 - 1 needs 257 KV tokens, limit 256"),
        (255, 2, 2),
        (240, 17, 17),
        (1, None, 256),
        (1, 256, 256),
        (1, 257, "prompt of 1 tokens + max_tokens 257 - 1 needs 257 KV tokens, limit 256"),
        (1, 2**31 - 1, "prompt of 1 tokens + max_tokens 511 - 1 needs 511 KV tokens, limit 256"),
    ],
)
def test_both_pools_count(
    model: ModelText, prompt: int, max_tokens: int | None, wanted: int | str
) -> None:
    fields: dict[str, Any] = {"token_ids": [1] * prompt}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if isinstance(wanted, str):
        with pytest.raises(RequestError) as caught:
            parse(model, POOLS, **fields)
        assert caught.value.message.startswith(wanted)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    else:
        spec = parse(model, POOLS, **fields)
        assert spec.max_tokens == wanted
        assert spec.max_kv_tokens == prompt + wanted - 1


# 16 blocks of 16 tokens; a prompt of 40 shares 2 of them.
@pytest.mark.parametrize(
    ("n", "prompt", "max_tokens", "wanted"),
    [
        (2, 40, 105, 105),  # 2 + 2 * 7 blocks: 144 rows each
        (2, 40, 106, "needs 145 KV tokens for each of n 2 answers, 288 in blocks of 16 of which"),
        (2, 40, None, 105),
        (1, 40, None, 217),
        (14, 40, None, 9),  # 2 + 14 * 1 blocks
        (15, 40, None, "needs 41 KV tokens for each of n 15 answers, 272 in blocks of 16"),
        (15, 40, 2, "they share 2, limit 256: the KV pool of the largest decode worker"),
        (128, 40, 1, 1),  # never leaves prefill
        (16, 5, 12, 12),
        (17, 5, 2, "needs 6 KV tokens for each of n 17 answers, 272 in blocks of 16"),
        (2, 300, 2, "needs 301 KV tokens for each of n 2 answers, 320 in blocks of 16"),
    ],
)
def test_all_answers_must_fit_the_decode_pool(
    model: ModelText, n: int, prompt: int, max_tokens: int | None, wanted: int | str
) -> None:
    fields: dict[str, Any] = {"token_ids": [1] * prompt, "n": n}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if isinstance(wanted, str):
        with pytest.raises(RequestError) as caught:
            parse(model, POOLS, **fields)
        assert wanted in caught.value.message
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        return
    spec = parse(model, POOLS, **fields)
    assert (spec.num_answers, spec.max_tokens) == (n, wanted)
    if wanted == 1:
        return
    # The workers' own rule, by which one token more would not fit.
    ledger = CapacityLedger(BlockPool(16), 16, AdmissionRule())
    ledger.check_can_fit(Newcomer(prompt, spec.max_kv_tokens, wanted, num_answers=n))
    with pytest.raises(NeverFitsError):
        ledger.check_can_fit(Newcomer(prompt, spec.max_kv_tokens + 1, wanted + 1, num_answers=n))


def test_a_resumed_stream_keeps_what_its_first_router_settled(model: ModelText) -> None:
    message = request(request_id="r")
    message.resume.start.CopyFrom(
        generation_pb2.StreamStart(seed=5, max_tokens=40, model_fingerprint="f")
    )
    message.resume.answers.add(token_ids=[1], num_text_bytes=1)
    spec = parse_request(message, model, limits(decode_kv_tokens=16))  # the larger worker is lost
    assert (spec.max_tokens, spec.sampling.seed) == (40, 5)
    assert spec.resumed is not None
    assert spec.resumed.answers[0].token_ids == (1,)
    assert not message.sampling.HasField("seed"), "the request itself is not changed"
    message.resume.start.max_tokens = 64
    with pytest.raises(RequestError, match=r"resume\.start\.max_tokens is 64, limit 6[0-3]: what"):
        parse_request(message, model, LIMITS)


@pytest.mark.parametrize(
    ("fields", "count", "max_tokens", "prompt_only"),
    [
        ({}, None, 62, False),
        ({"prompt_logprobs": 0}, 0, 62, False),
        ({"prompt_logprobs": 20, "max_tokens": 1}, 20, 1, False),
        ({"prompt_logprobs": 3, "max_tokens": 0}, 3, 1, True),
        ({"prompt_logprobs": 3, "max_tokens": 0, "n": 3}, 3, 1, True),
    ],
)
def test_prompt_logprobs_are_the_requests_and_no_attempts(
    model: ModelText, fields: dict[str, Any], count: int | None, max_tokens: int, prompt_only: bool
) -> None:
    spec = parse(model, **fields)
    assert (spec.prompt_logprobs, spec.max_tokens, spec.prompt_only) == (
        count,
        max_tokens,
        prompt_only,
    )
    assert not spec.sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize(("length", "count"), [(12_483, 20), (131_072, 1), (262_144, 0)])
def test_prompt_logprobs_are_bounded(model: ModelText, length: int, count: int) -> None:
    large = limits(context_length=1 << 20, prefill_kv_tokens=1 << 20, decode_kv_tokens=1 << 20)
    fields = {"prompt_logprobs": count, "max_tokens": 1}
    assert parse(model, token_ids=[1] * length, limits=large, **fields).prompt_logprobs == count
    with pytest.raises(RequestError) as error:
        parse(model, token_ids=[1] * (length + 1), limits=large, **fields)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"sampling.prompt_logprobs is {count}" in error.value.message
    assert "limit 262144" in error.value.message


def test_a_resumed_stream_is_not_told_its_prompt_again(model: ModelText) -> None:
    message = request(request_id="r", prompt_logprobs=2, max_tokens=0)
    message.resume.SetInParent()
    assert parse_request(message, model, LIMITS).prompt_logprobs == 2
    start = generation_pb2.StreamStart(seed=5, max_tokens=1, model_fingerprint="f")
    message.resume.start.CopyFrom(start)
    spec = parse_request(message, model, LIMITS)
    assert (spec.prompt_logprobs, spec.max_tokens, spec.prompt_only) == (None, 1, True)
