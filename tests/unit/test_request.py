"""parse_request: every rule of the protos, each error with field, value and limit."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BOS, EOS, write_byte_tokenizer

from legato.cluster.errors import RequestError
from legato.cluster.model_limits import ModelLimits
from legato.cluster.request import RequestSpec, parse_request
from legato.cluster.text.model_text import ModelText
from legato.protos import common_pb2, generation_pb2
from legato.worker.kv.block_pool import BlockPool
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.claim import AdmissionRule, NeverFitsError, Newcomer

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = ModelLimits(
    context_length=64,
    vocab_size=320,
    prefill_kv_tokens=10_000,
    decode_kv_tokens=10_000,
    decode_block_size=16,
)
INT_MAX = 2**31 - 1
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


def request(**fields: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401  # the message's fields
    """Prompt "hi" unless another is given; unknown names are fields of `sampling`."""
    message = generation_pb2.GenerateRequest()
    names = message.DESCRIPTOR.fields_by_name
    if not fields.keys() & {"text", "token_ids", "messages"}:
        message.text = "hi"
    for name, value in fields.items():
        if name == "token_ids":
            message.token_ids.ids.extend(value)
            message.token_ids.SetInParent()
        elif name == "messages":
            for role, content in value:
                message.messages.messages.add(role=role, content=content)
            message.messages.SetInParent()
        elif name in names:
            setattr(message, name, value)
        elif name == "logit_bias":
            for key, bias in value.items():
                message.sampling.logit_bias[key] = bias
        elif name in ("stop", "stop_token_ids"):
            getattr(message.sampling, name).extend(value)
        else:
            setattr(message.sampling, name, value)
    return message


def limits(**changes: int) -> ModelLimits:
    return ModelLimits(**(vars(LIMITS) | changes))


def parse(
    model: ModelText,
    limits: ModelLimits = LIMITS,
    **fields: Any,  # noqa: ANN401  # as in `request`
) -> RequestSpec:
    spec = parse_request(request(**fields), model, limits)
    SamplingParams.from_proto(spec.sampling)  # complete enough for a worker
    return spec


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
    ({"max_tokens": 0}, f"sampling.max_tokens is 0, limit [1, {INT_MAX}]"),
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
    ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[0] is -1, limit [0, 319]"),
    ({"logit_bias": {320: 1.0}}, "sampling.logit_bias[0] is 320, limit [0, 319]"),
    ({"logit_bias": {INT_MAX: 1.0}}, f"sampling.logit_bias[0] is {INT_MAX}"),
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
        (1, INT_MAX, "prompt of 1 tokens + max_tokens 511 - 1 needs 511 KV tokens, limit 256"),
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


def test_no_prompt_at_all(model: ModelText) -> None:
    with pytest.raises(RequestError, match="prompt is not set, limit exactly one of text, token"):
        parse_request(generation_pb2.GenerateRequest(), model, LIMITS)


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


def test_each_answer_has_a_seed_of_its_own(model: ModelText) -> None:
    spec = parse(model, n=3, seed=2**63 - 2)
    assert [spec.seed_of(index) for index in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert [spec.sampling_of(index).seed for index in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert spec.sampling.seed == 2**63 - 2


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
