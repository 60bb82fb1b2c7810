"""Requests of any fields, of any bytes, of newer clients and of any size."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_fields import LIMITS, request
from tiny_models import write_byte_tokenizer

from legato.cluster.errors import RequestError
from legato.cluster.model_limits import ModelLimits
from legato.cluster.request import parse_request
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2
from legato.worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


UNKNOWN = b"\xf8\x06\x01"  # field 111, varint 1


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (lambda message: message, "GenerateRequest has"),
        (lambda message: message.sampling, "sampling has"),
        (lambda message: message.messages, "messages has"),
        (lambda message: message.messages.messages.add(), "messages.messages[0] has"),
        (lambda message: message.token_ids, "token_ids has"),
    ],
)
def test_fields_of_newer_clients_are_not_ignored(
    model: ModelText, place: Callable[[generation_pb2.GenerateRequest], Any], where: str
) -> None:
    message = generation_pb2.GenerateRequest()
    place(message).MergeFromString(UNKNOWN)
    with pytest.raises(RequestError) as caught:
        parse_request(message, model, LIMITS)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.message.startswith(f"{where} field number 111")


def big(kind: str) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest()
    match kind:
        case "text":
            message.text = "word " * 800_000
        case "token_ids":
            message.token_ids.ids.extend([1] * 1_000_000)
        case "messages":
            message.messages.MergeFromString(b"\n\x00" * 1_000_000)
        case "content":
            message.messages.messages.add(role="user", content="<|im_end|>" * 400_000)
        case "logit_bias":
            message.text = "x"
            for index in range(100_000):
                message.sampling.logit_bias[index] = 0.0
        case "stop":
            message.text = "x"
            message.sampling.stop.extend(["a"] * 100_000)
        case "role":
            message.messages.messages.add(role="x" * 4_000_000, content="x")
        case "request_id":
            message.request_id = "x" * 4_000_000
    return message


@pytest.mark.parametrize(
    "kind",
    ["text", "token_ids", "messages", "content", "logit_bias", "stop", "role", "request_id"],
)
def test_what_is_far_too_big_is_refused_at_once(model: ModelText, kind: str) -> None:
    message = big(kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        parse_request(message, model, LIMITS)
    assert time.process_time() - start < 5  # a second, and the machine is shared
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert len(caught.value.message) < 400


def test_a_million_ids_are_taken_where_they_fit(model: ModelText) -> None:
    wide = ModelLimits(2_000_000, 320, 2_000_000, 2_000_000, 16)
    message = generation_pb2.GenerateRequest()
    message.token_ids.ids.extend([1] * 1_000_000)
    start = time.process_time()
    assert len(parse_request(message, model, wide).prompt_token_ids) == 1_000_000
    assert time.process_time() - start < 5  # a second, and the machine is shared


FLOATS = st.floats(width=32)


INTS = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 70)


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("max_tokens", "top_k", "min_tokens", "logprobs"), INTS),
        **{
            name: FLOATS | st.sampled_from([0.0, 0.5, 1.0])
            for name in ("temperature", "top_p", "min_p", "repetition_penalty",
                         "presence_penalty", "frequency_penalty")
        },
        "seed": st.integers(-(2**63), 2**63 - 1),
        "ignore_eos": st.booleans(),
        "stop": st.lists(st.text(max_size=3), max_size=3),
        "stop_token_ids": st.lists(INTS, max_size=3),
        "logit_bias": st.dictionaries(INTS, FLOATS, max_size=3),
    },
)  # fmt: skip


PROMPT = st.one_of(
    st.fixed_dictionaries({"text": st.text(max_size=80)}),
    st.fixed_dictionaries({"token_ids": st.lists(INTS, max_size=70)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.tuples(st.sampled_from(["user", "system", "tool", ""]), st.text(max_size=20)),
                max_size=4,
            )
        }
    ),
)


REST = st.fixed_dictionaries(
    {},
    optional={
        "n": INTS,
        "priority": INTS,
        "request_id": st.text(max_size=5),
        "parse_special_tokens": st.booleans(),
    },
)


def check_or_refused(message: generation_pb2.GenerateRequest, model: ModelText) -> None:
    try:
        spec = parse_request(message, model, LIMITS)
    except RequestError as error:
        if error.code is grpc.StatusCode.INVALID_ARGUMENT:
            assert "limit" in error.message  # noqa: PT017  # most messages are refused, not all
        return
    params = SamplingParams.from_proto(spec.sampling)
    assert params.max_tokens >= 1
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 1 <= len(spec.prompt_token_ids) <= 64 - params.max_tokens
    assert all(0 <= token < 320 for token in spec.prompt_token_ids)


@settings(max_examples=400, deadline=None)
@given(prompt=PROMPT, sampling=SAMPLING, rest=REST)
def test_any_fields_are_served_or_refused(
    model: ModelText, prompt: dict[str, Any], sampling: dict[str, Any], rest: dict[str, Any]
) -> None:
    check_or_refused(request(**prompt, **sampling, **rest), model)


@settings(max_examples=300, deadline=None)
@given(wire=st.binary(max_size=40), text=st.booleans())
def test_any_bytes_that_are_a_message_are_served_or_refused(
    model: ModelText, wire: bytes, text: bool
) -> None:
    message = generation_pb2.GenerateRequest(text="x") if text else generation_pb2.GenerateRequest()
    try:
        message.MergeFromString(wire)
    except Exception:  # protobuf's own refusal: such bytes reach no one
        return
    check_or_refused(message, model)
