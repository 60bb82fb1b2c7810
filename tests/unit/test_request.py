"""parse_request: every rule of the protos, each error with field, value and limit."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from request_fields import LIMITS, limits, parse, request
from tiny_models import BOS, EOS, write_byte_tokenizer

from legato.cluster.errors import RequestError
from legato.cluster.request import parse_request
from legato.cluster.text.model_text import ModelText
from legato.protos import common_pb2, generation_pb2

INT_MAX = 2**31 - 1
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


REFUSED: list[tuple[dict[str, Any], str]] = [
    # temperature
    ({"temperature": NAN}, "sampling.temperature is nan, limit [0, 100]"),
    ({"temperature": INF}, "sampling.temperature is inf, limit [0, 100]"),
    ({"temperature": -INF}, "sampling.temperature is -inf, limit [0, 100]"),
    ({"temperature": -1}, "sampling.temperature is -1, limit [0, 100]"),
    ({"temperature": -1e-40}, "sampling.temperature is -"),
    ({"temperature": 100.001}, "sampling.temperature is 100.001, limit [0, 100]"),
    # top_p
    ({"top_p": 0}, "sampling.top_p is 0, limit (0, 1]"),
    ({"top_p": -0.0}, "sampling.top_p is -0, limit (0, 1]"),
    ({"top_p": -0.1}, "sampling.top_p is -0.1"),
    ({"top_p": NAN}, "sampling.top_p is nan, limit (0, 1]"),
    ({"top_p": 1.0000001}, "sampling.top_p is 1.0000001, limit (0, 1]"),
    ({"top_p": INF}, "sampling.top_p is inf"),
    # top_k
    ({"top_k": -1}, f"sampling.top_k is -1, limit [0, {INT_MAX}] (0 is off)"),
    ({"top_k": -2}, "sampling.top_k is -2"),
    ({"top_k": -(2**31)}, "sampling.top_k is -2147483648"),
    # min_p
    ({"min_p": -0.1}, "sampling.min_p is -0.1"),
    ({"min_p": 1.5}, "sampling.min_p is 1.5, limit [0, 1]"),
    ({"min_p": NAN}, "sampling.min_p is nan, limit [0, 1]"),
    # penalties
    ({"repetition_penalty": 0}, "sampling.repetition_penalty is 0, limit (0, 100]"),
    ({"repetition_penalty": -1}, "sampling.repetition_penalty is -1"),
    ({"repetition_penalty": NAN}, "sampling.repetition_penalty is nan"),
    ({"repetition_penalty": INF}, "sampling.repetition_penalty is inf"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty is 2.5, limit [-2, 2]"),
    ({"presence_penalty": -2.5}, "sampling.presence_penalty is -2.5, limit [-2, 2]"),
    ({"presence_penalty": NAN}, "sampling.presence_penalty is nan"),
    ({"frequency_penalty": 2.0000002}, "sampling.frequency_penalty is 2.0000002, limit [-2, 2]"),
    ({"frequency_penalty": -INF}, "sampling.frequency_penalty is -inf"),
    ({"frequency_penalty": NAN}, "sampling.frequency_penalty is nan"),
    # seed
    ({"seed": -1}, f"sampling.seed is -1, limit [0, {2**63 - 1}]"),
    ({"seed": -(2**63)}, f"sampling.seed is -{2**63}"),
    # max_tokens, min_tokens
    ({"max_tokens": 0}, f"sampling.max_tokens is 0, limit [1, {INT_MAX}], or 0 with prompt_log"),
    ({"max_tokens": -1}, "sampling.max_tokens is -1"),
    ({"max_tokens": -(2**31)}, "sampling.max_tokens is -2147483648"),
    ({"min_tokens": -1}, "sampling.min_tokens is -1, limit [0, 256] (max_tokens)"),
    ({"min_tokens": 6, "max_tokens": 5}, "sampling.min_tokens is 6, limit [0, 5] (max_tokens)"),
    ({"min_tokens": 257}, "sampling.min_tokens is 257, limit [0, 256] (max_tokens)"),
    ({"min_tokens": INT_MAX}, f"sampling.min_tokens is {INT_MAX}, limit [0, 256]"),
    # logprobs
    ({"logprobs": -1}, "sampling.logprobs is -1, limit [0, 20]"),
    ({"logprobs": 21}, "sampling.logprobs is 21, limit [0, 20]"),
    ({"logprobs": 320}, "sampling.logprobs is 320, limit [0, 20]"),
    # stop
    ({"stop": [""]}, "sampling.stop[0] is empty, limit [1, 1024] chars"),
    ({"stop": ["a", ""]}, "sampling.stop[1] is empty"),
    ({"stop": ["a"] * 17}, "sampling.stop has 17 entries, limit 16"),
    ({"stop": ["a"] * 100_000}, "sampling.stop has 100000 entries, limit 16"),
    ({"stop": ["a" * 1025]}, "sampling.stop[0] has 1025 chars, limit [1, 1024]"),
    ({"stop": ["a" * 1_000_000]}, "sampling.stop[0] has 1000000 chars"),
    # ids
    ({"stop_token_ids": [-1]}, "sampling.stop_token_ids[0] is -1, limit [0, 319]"),
    ({"stop_token_ids": [1, 320]}, "sampling.stop_token_ids[1] is 320, limit [0, 319]"),
    ({"stop_token_ids": [INT_MAX]}, f"sampling.stop_token_ids[0] is {INT_MAX}"),
    ({"stop_token_ids": [1] * 65}, "sampling.stop_token_ids has 65 entries, limit 64"),
    ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1] has token id -1, limit [0, 319]"),
    ({"logit_bias": {320: 1.0}}, "sampling.logit_bias[320] has token id 320, limit [0, 319]"),
    ({"logit_bias": {INT_MAX: 1.0}}, f"sampling.logit_bias[{INT_MAX}] has token id"),
    ({"logit_bias": {5: 100.001}}, "sampling.logit_bias[5] is 100.001, limit [-100, 100]"),
    ({"logit_bias": {5: -101}}, "sampling.logit_bias[5] is -101, limit [-100, 100]"),
    ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5] is nan"),
    ({"logit_bias": {5: INF}}, "sampling.logit_bias[5] is inf"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "sampling.logit_bias has 1025 entries"),
    ({"token_ids": [-1]}, "token_ids[0] is -1, limit [0, 319] (vocabulary of 320)"),
    ({"token_ids": [1, 2, 320]}, "token_ids[2] is 320, limit [0, 319]"),
    ({"token_ids": [INT_MAX]}, f"token_ids[0] is {INT_MAX}"),
    # prompts
    ({"text": ""}, "text is empty, limit at least 1 token"),
    ({"token_ids": []}, "token_ids is empty, limit at least 1 token"),
    ({"messages": []}, "messages has 0 entries, limit [1, 1024]"),
    ({"messages": [("user", "x")] * 1025}, "messages has 1025 entries, limit [1, 1024]"),
    ({"messages": [("user", "x"), ("", "y")]}, "messages[1].role is '', limit one of system, user"),
    ({"messages": [("user", ""), ("system", "")]}, "messages: every content is empty, limit at le"),
    ({"messages": [("tool", "x")]}, "messages[0].role is 'tool', limit one of system, user, assis"),
    ({"messages": [("User", "x")]}, "messages[0].role is 'User'"),
    ({"messages": [("x" * 10_000, "x")]}, "messages[0].role is 'xxx"),
    ({"token_ids": [1] * 64}, "prompt has 64 tokens, limit 63: the context is 64"),
    ({"token_ids": [1] * 65}, "prompt has 65 tokens, limit 63: the context is 64"),
    ({"text": "x" * 64}, "prompt has 64 tokens, limit 63: the context is 64"),
    ({"text": "x" * 5000}, "text has 5000 chars, limit 768"),
    ({"messages": [("user", "x" * 60)]}, "prompt has"),
    ({"messages": [("user", "x" * 400), ("user", "x" * 400)]}, "messages has 800 chars, limit 768"),
    # other fields
    ({"n": 0}, "n is 0, limit [1, 128]"),
    ({"n": -1}, "n is -1, limit [1, 128]"),
    ({"n": 10**6}, "n is 1000000, limit [1, 128]"),
    ({"priority": 9}, "priority is 9, limit one of PRIORITY_UNSPECIFIED, PRIORITY_INTERACTIVE"),
    ({"priority": -1}, "priority is -1, limit one of"),
    ({"request_id": "x" * 129}, "request_id has 129 chars, limit 128"),
    ({"request_id": "x" * 10_000}, "request_id has 10000 chars, limit 128"),
    ({"request_id": "a\nb"}, "request_id is 'a\\nb', limit printable ASCII characters"),
    ({"request_id": "\x7f"}, "request_id is '\\x7f', limit printable"),
    ({"request_id": "é"}, "request_id is 'é', limit printable"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_refused_with_field_value_and_limit(
    model: ModelText, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(model, **fields)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message.startswith(sentence)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        # zero is a value
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": -0.0}, {"temperature": 0.0}),
        ({"temperature": 1e-40}, {}),
        ({"temperature": 1e-5}, {}),
        ({"temperature": 100}, {"temperature": 100.0}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 320}, {"top_k": 320}),
        ({"top_k": INT_MAX}, {"top_k": INT_MAX}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_p": 1e-30}, {}),
        ({"min_p": 0}, {"min_p": 0.0}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"repetition_penalty": 0.5}, {"repetition_penalty": 0.5}),
        ({"presence_penalty": 0}, {"presence_penalty": 0.0}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"ignore_eos": False}, {"ignore_eos": False}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"min_tokens": 0}, {"min_tokens": 0}),
        ({"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 5, "max_tokens": 5}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 20}, {"logprobs": 20}),
        ({"logit_bias": {319: -100.0, 0: 100.0}}, {"logit_bias": {319: -100.0, 0: 100.0}}),
        ({"logit_bias": {5: 0.0}}, {"logit_bias": {5: 0.0}}),
        ({"stop_token_ids": [0, 319]}, {"stop_token_ids": [0, 319]}),
        ({"stop_token_ids": [7] * 64}, {"stop_token_ids": [7] * 64}),
        ({"stop": ["a" * 1024] * 16}, {"stop": ["a" * 1024] * 16}),
        # unset is the documented default
        (
            {},
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
             "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False,
             "min_tokens": 0, "max_tokens": 62, "stop": [], "stop_token_ids": [],
             "logit_bias": {}},
        ),
        # clamps
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": 62}, {"max_tokens": 62}),
        ({"max_tokens": 63}, {"max_tokens": 62}),
        ({"max_tokens": INT_MAX}, {"max_tokens": 62}),
        ({"max_tokens": INT_MAX, "min_tokens": 63}, {"max_tokens": 62, "min_tokens": 62}),
        ({"token_ids": [1] * 63}, {"max_tokens": 1}),
        ({"token_ids": [1] * 63, "max_tokens": 2}, {"max_tokens": 1}),
        ({"token_ids": [1] * 63, "min_tokens": 256}, {"min_tokens": 1}),
    ],
)  # fmt: skip
def test_taken(model: ModelText, fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    sampling = parse(model, **fields).sampling
    for name, value in wanted.items():
        got = getattr(sampling, name)
        if isinstance(value, list):
            got = list(got)
        elif isinstance(value, dict):
            got = dict(got)
        assert got == value, name


def test_zero_and_unset_differ(model: ModelText) -> None:
    assert parse(model, temperature=0).sampling.temperature == 0
    assert parse(model).sampling.temperature == 1
    assert parse(model, logprobs=0).sampling.HasField("logprobs")
    assert not parse(model).sampling.HasField("logprobs")
    assert str(parse(model, temperature=-0.0).sampling.temperature) == "0.0"


def test_unset_seeds_differ(model: ModelText) -> None:
    seeds = {parse(model).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_request_itself_is_not_changed(model: ModelText) -> None:
    asked = request(max_tokens=10_000)
    before = asked.SerializeToString()
    parse_request(asked, model, LIMITS)
    assert asked.SerializeToString() == before


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"text": "hi"}, list(b"hi")),
        ({"text": " "}, [32]),
        ({"text": "<s>"}, list(b"<s>")),
        ({"text": "<s>", "parse_special_tokens": True}, [BOS]),
        ({"token_ids": [319, 0, BOS]}, [319, 0, BOS]),
    ],
)
def test_prompts(model: ModelText, fields: dict[str, Any], ids: list[int]) -> None:
    assert list(parse(model, **fields).prompt_token_ids) == ids


def test_chat_prompts(model: ModelText) -> None:
    spec = parse(model, messages=[("user", "hi"), ("assistant", ""), ("user", "<s>")],
                 limits=limits(context_length=256))  # fmt: skip
    assert bytes(i for i in spec.prompt_token_ids if i < 256) == (
        b"user\nhi\nassistant\n\nuser\n<s>\nassistant\n"
    )
    assert BOS not in spec.prompt_token_ids


def test_the_other_fields(model: ModelText) -> None:
    spec = parse(model, request_id="x" * 128, n=1, priority=common_pb2.PRIORITY_BATCH, stop=["s"])
    assert (spec.request_id, spec.batch_priority, spec.stop) == ("x" * 128, True, ("s",))
    assert spec.eos_token_ids == (EOS,)
    assert parse(model, request_id=" ~").request_id == " ~"
    assert not parse(model, priority=common_pb2.PRIORITY_INTERACTIVE).batch_priority
    assert not parse(model).batch_priority
    made = {parse(model).request_id for _ in range(10)}
    assert len(made) == 10
    assert all(made)


def test_eos_ids_outside_the_model_are_left_out(model: ModelText) -> None:
    assert parse(model, limits(vocab_size=EOS)).eos_token_ids == ()


def test_no_prompt_at_all(model: ModelText) -> None:
    with pytest.raises(RequestError, match="prompt is not set, limit exactly one of text, token"):
        parse_request(generation_pb2.GenerateRequest(), model, LIMITS)


def test_each_answer_has_a_seed_of_its_own(model: ModelText) -> None:
    spec = parse(model, n=3, seed=2**63 - 2)
    assert [spec.seed_of(index) for index in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert [spec.sampling_of(index).seed for index in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert spec.sampling.seed == 2**63 - 2
