"""The client's rules, without a network: addresses, requests, offsets, what follows an error."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from legato.cluster.client_attempts import Attempts
from legato.cluster.client_errors import CallFailedError
from legato.cluster.client_requests import make_request
from legato.cluster.client_stream import StreamState
from legato.cluster.client_target import parse_addresses
from legato.cluster.retry_policy import (
    Failure,
    RetryOptions,
    Setting,
    failure_of,
    retry_delay_s,
)
from legato.cluster.rotation import SHUNNED_S, Rotation
from legato.protos import common_pb2, generation_pb2
from legato.protos.status_details import DETAILS_KEY, details_trailer, read_details

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OPTIONS = RetryOptions(first_backoff_s=0.1, max_backoff_s=2.0, jitter=0.25, max_outage_s=60.0)


# --- addresses --------------------------------------------------------------------------------


def test_addresses_of_several_routers() -> None:
    assert parse_addresses("a:1") == ("a:1",)
    assert parse_addresses("a:1, b:2,a:1") == ("a:1", "b:2")
    assert parse_addresses(["a:1,b:2", "[::1]:3"]) == ("a:1", "b:2", "[::1]:3")


@pytest.mark.parametrize(
    "wrong", ["", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "a:1,b", "a:x", "a:²", "::1:5"]
)
def test_a_wrong_address_is_named(wrong: str) -> None:
    named = next(word for word in reversed(wrong.split(",")))
    with pytest.raises(ValueError, match="limit host:port") as raised:
        parse_addresses(wrong)
    assert repr(named) in str(raised.value)
    with pytest.raises(ValueError, match="names no router"):
        parse_addresses([])


# --- requests ---------------------------------------------------------------------------------


def test_a_request_of_every_setting() -> None:
    request = make_request(
        "hello",
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        seed=0,
        stop="x",
        stop_token_ids=[7],
        ignore_eos=True,
        min_tokens=2,
        logit_bias={3: -1.5},
        logprobs=0,
        prompt_logprobs=0,
        guide=common_pb2.Guide(regex="a+"),
        n=2,
        priority="batch",
        request_id="r",
        parse_special_tokens=True,
        cache_salt="s",
    )
    assert request == generation_pb2.GenerateRequest(
        request_id="r",
        text="hello",
        n=2,
        priority=common_pb2.PRIORITY_BATCH,
        parse_special_tokens=True,
        cache_salt="s",
        sampling=common_pb2.SamplingParams(
            max_tokens=5,
            temperature=0.0,
            top_p=0.5,
            top_k=3,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            seed=0,
            stop=["x"],
            stop_token_ids=[7],
            ignore_eos=True,
            min_tokens=2,
            logit_bias={3: -1.5},
            logprobs=0,
            prompt_logprobs=0,
            guide=common_pb2.Guide(regex="a+"),
        ),
    )
    named = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {field.name for field, _ in request.sampling.ListFields()} == named, "one has no setting"


def test_prompts_of_every_kind() -> None:
    assert make_request([1, 2]).token_ids.ids == [1, 2]
    assert make_request([]).WhichOneof("prompt") == "token_ids"  # the service says what is wrong
    chat = [
        {"role": "system", "content": "s"},
        generation_pb2.ChatMessage(role="user", content="u"),
    ]
    messages = make_request(chat).messages.messages
    assert [(m.role, m.content) for m in messages] == [("system", "s"), ("user", "u")]
    whole = generation_pb2.GenerateRequest(text="x")
    made = make_request(whole)
    assert (made.text, whole.request_id) == ("x", ""), "the caller's is left as it was"
    assert made.request_id != make_request(whole).request_id


@pytest.mark.parametrize(
    ("prompt", "settings", "kind", "sentence"),
    [
        ("x", {"top_z": 1}, TypeError, "top_z: there is no such setting"),
        ("x", {"max_tokens": 2**31}, ValueError, "max_tokens is 2147483648: "),
        ("x", {"max_tokens": "5"}, TypeError, "max_tokens is '5': "),
        ("x", {"stop": [1]}, TypeError, r"stop is \[1\]: "),
        ("x", {"priority": "high"}, ValueError, "priority is 'high', limit one of interactive"),
        ("x", {"resume": None}, TypeError, "resume: there is no such setting"),
        ([{"role": "user"}], {}, TypeError, r"prompt\[0\] is no mapping of role and content"),
        (generation_pb2.GenerateRequest(), {"n": 2}, TypeError, "n: a whole request has settings"),
    ],
)
def test_a_wrong_setting_is_named(
    prompt: Any,  # noqa: ANN401
    settings: dict[str, Any],
    kind: type[Exception],
    sentence: str,
) -> None:
    with pytest.raises(kind, match=sentence):
        make_request(prompt, **settings)


# --- the hint ---------------------------------------------------------------------------------


def hint_trailer(code: int, message: str, seconds: float) -> tuple[str, bytes]:
    return details_trailer(code, message, reason="R", remedy="Wait.", retry_after_s=seconds)


def retry_after_s(trailers: list[tuple[str, str | bytes]]) -> float | None:
    return read_details(trailers).retry_after_s


def test_the_hint_comes_through_as_google_rpc_has_it() -> None:
    trailer = hint_trailer(8, "the queue is full", 1.25)
    status = status_pb2.Status.FromString(trailer[1])
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message) == (8, "the queue is full")
    assert info.retry_delay == duration_pb2.Duration(seconds=1, nanos=250_000_000)
    assert retry_after_s([("x", "y"), trailer]) == 1.25


def test_a_hint_that_cannot_be_read_is_none() -> None:
    other = status_pb2.Status(code=8)
    other.details.add().Pack(error_details_pb2.ErrorInfo(reason="r"))
    negative = status_pb2.Status()
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds = -5
    negative.details.add().Pack(info)
    torn = status_pb2.Status()
    torn.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    assert retry_after_s([]) is None
    assert retry_after_s([(DETAILS_KEY, b"\xff\xff")]) is None
    assert retry_after_s([(DETAILS_KEY, "text")]) is None
    assert retry_after_s([(DETAILS_KEY, other.SerializeToString())]) is None
    assert retry_after_s([(DETAILS_KEY, torn.SerializeToString())]) is None
    assert retry_after_s([(DETAILS_KEY, negative.SerializeToString())]) == 0.0


# --- the policy -------------------------------------------------------------------------------


def delay_s(
    failure: Failure,
    *,
    num_failures: int = 1,
    num_routers: int = 1,
    left_s: float = 100.0,
    outage_s: float = 0.0,
    draw: float = 0.5,
) -> float | None:
    return retry_delay_s(
        failure, Setting(num_failures, num_routers, left_s, outage_s), OPTIONS, draw
    )


@pytest.mark.parametrize(
    "code",
    [c for c in grpc.StatusCode if c not in (UNAVAILABLE, EXHAUSTED)],
    ids=lambda code: code.name,
)
def test_what_is_never_tried_again(code: grpc.StatusCode) -> None:
    assert delay_s(Failure(code, "", retry_after_s=1.0)) is None


def test_what_the_service_calls_final_is_not_tried_again() -> None:
    assert delay_s(Failure(UNAVAILABLE, "", is_final=True), num_routers=2) is None


def test_a_refusal_waits_as_long_as_the_hint_says() -> None:
    full = Failure(EXHAUSTED, "", retry_after_s=2.0)
    for draw in (0.0, 0.5, 1.0):
        assert delay_s(full, draw=draw) == 2.0 * (1 + 0.25 * draw), "never sooner"
        assert delay_s(full, num_routers=3, draw=draw) == 2.0 * (1 + 0.25 * draw)
    assert delay_s(Failure(EXHAUSTED, "the message is too large")) is None
    assert delay_s(full, outage_s=1000.0) == 2.25, "a router that refuses is there"


def test_other_routers_are_asked_at_once_and_then_after_a_pause() -> None:
    gone = Failure(UNAVAILABLE, "")
    delays = [delay_s(gone, num_failures=count, num_routers=3) for count in range(1, 10)]
    assert delays == [0, 0, 0.1, 0, 0, 0.2, 0, 0, 0.4]
    told = Failure(UNAVAILABLE, "", retry_after_s=1.0)
    assert delay_s(told, num_failures=1, num_routers=2) == 0
    assert delay_s(told, num_failures=2, num_routers=2, draw=0.0) == 1.0


def test_a_backoff_doubles_up_to_its_cap_and_varies() -> None:
    gone = Failure(UNAVAILABLE, "")
    assert [delay_s(gone, num_failures=n) for n in range(1, 8)] == [
        *(0.1, 0.2, 0.4, 0.8, 1.6, 2.0),
        2.0,
    ]
    assert delay_s(gone, num_failures=10**9) == 2.0
    assert delay_s(gone, draw=0.0) == pytest.approx(0.075)
    assert delay_s(gone, draw=1.0) == pytest.approx(0.125)


def test_nobody_waits_beyond_the_deadline_or_the_longest_outage() -> None:
    full = Failure(EXHAUSTED, "", retry_after_s=2.0)
    assert delay_s(full, left_s=2.3) == 2.25
    assert delay_s(full, left_s=2.25) is None
    gone = Failure(UNAVAILABLE, "")
    assert delay_s(gone, left_s=0.1) is None
    assert delay_s(gone, outage_s=59.8) == 0.1
    assert delay_s(gone, outage_s=59.95) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_backoff_s", 0.0),
        ("max_backoff_s", math.nan),
        ("max_outage_s", math.inf),
        ("jitter", 1.5),
        ("jitter", math.nan),
    ],
)
def test_wrong_options_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, limit"):
        RetryOptions(**{name: value})


class Ended(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (hint_trailer(14, "", 2.0),)


def test_a_call_that_was_cut_is_unavailable_in_whatever_words() -> None:
    codes = grpc.StatusCode
    cancelled = Failure(UNAVAILABLE, "CANCELLED", 2.0, reason="R", remedy="Wait.")
    assert failure_of(Ended(codes.CANCELLED, "")) == cancelled
    assert failure_of(Ended(codes.UNKNOWN, "Stream removed (x)")).code is UNAVAILABLE
    assert failure_of(Ended(codes.UNKNOWN, "x")).code is codes.UNKNOWN


# --- rotation ---------------------------------------------------------------------------------


def test_requests_go_round_and_around_those_that_failed() -> None:
    now_s = 0.0
    rotation = Rotation(["a", "b", "c"], now=lambda: now_s)
    assert [rotation.pick() for _ in range(4)] == ["a", "b", "c", "a"]
    rotation.failed("b")
    assert {rotation.pick() for _ in range(6)} == {"a", "c"}
    assert rotation.pick({"a", "c"}) == "b", "rather than one that was tried"
    now_s = SHUNNED_S
    assert {rotation.pick() for _ in range(3)} == {"a", "b", "c"}
    rotation.failed("b")
    rotation.answered("b")
    assert {rotation.pick() for _ in range(3)} == {"a", "b", "c"}
    for target in rotation.targets:
        rotation.failed(target)
    assert {rotation.pick() for _ in range(3)} == {"a", "b", "c"}, "somebody must be asked"


# --- a stream ---------------------------------------------------------------------------------

START = generation_pb2.StreamStart(seed=5, max_tokens=9, model_fingerprint="f")


def delta(
    *ids: int, offset: int, text: str = "", index: int = 0, start: bool = False
) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        request_id="r",
        index=index,
        delta=generation_pb2.Delta(token_ids=ids, token_offset=offset, text=text),
        start=START if start else None,
    )


def finish(num_tokens: int, index: int = 0) -> generation_pb2.GenerateResponse:
    usage = generation_pb2.Usage(completion_tokens=num_tokens)
    finish = generation_pb2.Finish(finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
    return generation_pb2.GenerateResponse(request_id="r", index=index, finish=finish)


def stream(n: int = 1) -> StreamState:
    state = StreamState(make_request("x", request_id="r", n=n))
    state.next_request()
    return state


def test_what_a_second_try_asks_for() -> None:
    state = stream(n=3)
    again = state.next_request()
    assert again.HasField("resume"), "an older call may still be in flight"
    assert again.resume == generation_pb2.Resume()
    state.take(delta(1, 2, offset=0, text="né", start=True))
    state.take(delta(4, offset=0, index=2))
    state.take(finish(1, index=2))
    resume = state.next_request().resume
    assert resume.start == START
    received = [(list(a.token_ids), a.num_text_bytes, a.finished) for a in resume.answers]
    assert received == [([1, 2], 3, False), ([], 0, False), ([], 0, True)]
    assert not state.done
    assert not state.request.HasField("resume")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([delta(1, offset=0)], "the first message without a start"),
        ([delta(1, offset=1, start=True)], "token 1 of answer 0 where 0 comes next"),
        (
            [delta(1, offset=0, start=True), delta(1, offset=0)],
            "token 0 of answer 0 where 1 comes next",
        ),
        ([delta(1, offset=0, index=1, start=True)], "answer 1 of 1"),
        ([delta(1, offset=0, start=True), finish(2)], "answer 0 with 2 tokens where 1 have come"),
        (
            [delta(1, offset=0, start=True), finish(1), delta(1, offset=1)],
            "a message behind the finish of answer 0",
        ),
        (
            [
                delta(1, offset=0, start=True),
                generation_pb2.GenerateResponse(
                    request_id="r", start=generation_pb2.StreamStart(seed=6)
                ),
            ],
            "another seed, max_tokens or model than the stream began with",
        ),
        ([generation_pb2.GenerateResponse(request_id="s", start=START)], "of request 's'"),
    ],
)
def test_a_message_that_is_not_the_next_is_a_fault(
    messages: list[generation_pb2.GenerateResponse], sentence: str
) -> None:
    state = stream()
    for message in messages[:-1]:
        state.take(message)
    with pytest.raises(CallFailedError, match=sentence) as raised:
        state.take(messages[-1])
    assert raised.value.code() is grpc.StatusCode.DATA_LOSS


# --- tries ------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def attempts(clock: Clock, targets: str = "a:1,b:2", timeout_s: float = 10.0) -> Attempts:
    return Attempts(
        make_request("x", request_id="r"),
        Rotation(parse_addresses(targets), now=clock),
        OPTIONS,
        timeout_s,
        now=clock,
        draw=lambda: 0.5,
    )


def test_one_deadline_bounds_all_tries() -> None:
    clock = Clock()
    tries = attempts(clock)
    first = tries.next()
    assert (first.target, first.timeout_s) == ("a:1", 10.0)
    tries.take(delta(1, 2, offset=0, start=True))
    clock.now_s += 6
    assert tries.failed(Failure(UNAVAILABLE, "")) == 0
    second = tries.next()
    assert (second.target, second.timeout_s) == ("b:2", 4.0)
    assert second.request.resume.answers[0].token_ids == [1, 2]
    clock.now_s += 4
    with pytest.raises(CallFailedError, match=r"the deadline of 10 s .*tokens until then: 2\)$"):
        tries.failed(Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    with pytest.raises(CallFailedError, match=r"the deadline of 10 s passed") as raised:
        tries.next()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert tries.num_attempts == 2


def test_a_message_ends_the_outage_and_the_round() -> None:
    clock = Clock()
    tries = attempts(clock, timeout_s=1000.0)
    gone = Failure(UNAVAILABLE, "gone")
    assert tries.next().target == "a:1"
    assert tries.failed(gone) == 0
    assert tries.next().target == "b:2"
    assert tries.failed(gone) == 0.1
    assert tries.next().target == "a:1"
    clock.now_s += 59
    tries.take(delta(1, offset=0, start=True))
    clock.now_s += 59
    assert tries.failed(gone) == 0
    assert tries.next().target == "b:2", "not the one that it was cut off from"
    clock.now_s += 59
    assert tries.failed(gone) == 0.1
    tries.next()
    clock.now_s += 2
    with pytest.raises(CallFailedError, match="UNAVAILABLE: gone"):
        tries.failed(gone)


ENDS = Failure(UNAVAILABLE, "the service is shutting down", 1.0, reason="SHUTTING_DOWN")
GONE = Failure(UNAVAILABLE, "gone")


def test_a_service_that_ends_is_not_waited_for_where_no_other_router_is_known() -> None:
    tries = attempts(Clock(), "a:1", timeout_s=1000.0)
    tries.next()
    tries.take(delta(1, 2, offset=0, start=True))
    sentence = r"shutting down \(tokens until then: 2\), and no other router takes the request"
    with pytest.raises(CallFailedError, match=sentence) as raised:
        tries.failed(ENDS)
    assert raised.value.reason == "SHUTTING_DOWN"


def test_where_one_of_two_routers_says_that_its_service_ends_the_other_is_asked() -> None:
    tries = attempts(Clock(), timeout_s=1000.0)
    assert tries.next().target == "a:1"
    assert tries.failed(ENDS) == 0
    assert tries.next().target == "b:2"
    tries.take(delta(1, offset=0, start=True))
    assert tries.failed(GONE) == 0, "a message since: it may be back"
    assert tries.next().target == "a:1"
    assert tries.failed(ENDS) == 0.1
    assert tries.next().target == "b:2", "not the one that ends"
    with pytest.raises(CallFailedError, match="shutting down"):
        tries.failed(ENDS)


def test_the_other_router_of_a_service_that_ends_is_not_waited_for_long() -> None:
    clock = Clock()
    tries = attempts(clock, timeout_s=1000.0)
    tries.next()
    clock.now_s += 30  # an outage before counts nothing
    tries.failed(GONE)
    tries.next()
    assert tries.failed(ENDS) == 0.1
    clock.now_s += 1.7
    assert tries.next().target == "a:1"
    assert tries.failed(GONE) == 0
    clock.now_s += 0.4
    assert tries.next().target == "a:1"
    with pytest.raises(CallFailedError, match="shutting down"):
        tries.failed(GONE)


def test_a_router_that_is_only_gone_is_waited_for() -> None:
    clock = Clock()
    tries = attempts(clock, "a:1", timeout_s=1000.0)
    for _ in range(29):
        tries.next()
        assert tries.failed(GONE) > 0
        clock.now_s += 2


def test_a_deadline_that_is_none_is_refused() -> None:
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"timeout_s is {wrong}, limit above 0"):
            attempts(Clock(), timeout_s=wrong)
