"""A stream that breaks anywhere goes on at another router over the same (fake) workers."""

from __future__ import annotations

import asyncio
import codecs
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cut_streams import check_every_cut, read, rest_of
from fake_worker import SEED, FakeWorker
from raw_client import RawClient
from router_service import (
    FakeDelta,
    Service,
    another_router,
    ask,
    expected,
    text_of,
    until,
)

from legato.cluster.in_flight import Ownership
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cut_streams import Responses

# Each token is a byte of this.
PHRASE = ("né€🙂ß" * 3).encode()


class ByteText:
    """Holds back what is no whole character."""

    stop: str | None = None

    def __init__(self, *_: object) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> FakeDelta:
        first = self._num_tokens
        self._num_tokens += len(token_ids)
        return FakeDelta(
            self._decoder.decode(PHRASE[first : self._num_tokens]), len(token_ids), None
        )

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@asynccontextmanager
async def other_client(
    service: Service, new_answer: Callable[..., Any] | None = None
) -> AsyncIterator[RawClient]:
    """Of another router; `new_answer` is both routers' source of text."""
    async with another_router(service) as (router, address), RawClient(address) as other:
        if new_answer is not None:
            service.router.reader._new_answer = router.reader._new_answer = new_answer
        yield other
        await service.settle()
        await until(lambda: router.num_in_flight == 0 and router.admission.num_queued == 0)
        assert router.counters.failed == 0


async def cut(
    service: Service,
    request: generation_pb2.GenerateRequest,
    new_answer: Callable[..., Any] | None = None,
) -> Responses:
    async with other_client(service, new_answer) as other:
        return await check_every_cut(service.client, other, request)


def pair(**decode: Any) -> Service:  # noqa: ANN401
    return Service([FakeWorker("prefill")], [FakeWorker("decode", **decode)])


async def test_every_cut_of_a_plain_answer() -> None:
    async with pair() as service:
        whole = await cut(service, ask("hello", 12, request_id="r"))
        assert len(whole) == 13
        assert [r.HasField("start") for r in whole] == [True] + [False] * 12
        assert whole[0].start.model_fingerprint == "f1"


async def test_every_cut_of_messages_of_several_tokens_with_logprobs() -> None:
    async with pair(tokens_per_event=3) as service:
        whole = await cut(service, ask("hello", 12, request_id="r", logprobs=2))
        assert sum(len(r.delta.logprobs) for r in whole) == 12


async def test_every_cut_within_characters() -> None:
    async with pair() as service:
        request = ask("hello", len(PHRASE), request_id="r")
        whole = await cut(service, request, ByteText)
        assert "".join(r.delta.text for r in whole) == PHRASE.decode()
        assert sum(not r.delta.text for r in whole) > 10


async def test_every_cut_where_the_end_brings_text_that_was_held_back() -> None:
    async with pair() as service:
        request = ask("hello", len(PHRASE) - 7, request_id="r")  # within a smile
        whole = await cut(service, request, ByteText)
        assert whole[-2].delta.text == "\ufffd"


@pytest.mark.parametrize("tokens_per_event", [1, 4])
async def test_every_cut_within_a_stop_string(tokens_per_event: int) -> None:
    text = text_of(expected("hello", 40))
    stop = text[12:18]
    assert text.index(stop) == 12
    near = f"{text[4:9]}!"  # is held back, and is none
    async with pair(tokens_per_event=tokens_per_event) as service:
        whole = await cut(service, ask("hello", 30, request_id="r", stop=[near, stop]))
        assert "".join(r.delta.text for r in whole) == text[:12]
        assert whole[-1].finish.stop_reason == stop


async def test_every_cut_of_three_answers_of_which_one_stops_early() -> None:
    ids = [expected("hello", 60, answer) for answer in range(3)]
    stop = text_of(ids[1][3:7])
    async with pair() as service:
        whole = await cut(service, ask("hello", 15, n=3, request_id="r", stop=[stop]))
        reasons = [r.finish.finish_reason for r in whole if r.HasField("finish")]
        assert reasons.count(common_pb2.FINISH_REASON_STOP) == 1
        assert len(reasons) == 3
        first = next(i for i, r in enumerate(whole) if r.HasField("finish"))
        assert first < len(whole) - 5, "the others go on for a while"


async def test_a_seed_that_the_router_drew_is_kept() -> None:
    async with pair() as service, another_router(service) as (_, address):
        request = ask("hello", 10, request_id="r")
        request.sampling.seed = 77
        whole = await read(service.client, request)
        request.sampling.ClearField("seed")
        _, resumed = rest_of(request, whole[:4])
        async with RawClient(address) as other:
            rest = await read(other, resumed)
        tokens = [t for r in whole[:4] + rest for t in r.delta.token_ids]
        assert tokens == [t for r in whole for t in r.delta.token_ids]
        assert rest[-1].finish.usage.seed == 77


async def test_tokens_that_prefill_has_no_room_for_come_again_in_decode() -> None:
    prefill = FakeWorker("prefill", total_blocks=3)  # 12 rows
    async with Service([prefill], [FakeWorker("decode")]) as service:
        request = ask("hello", 30, request_id="r")
        whole = await read(service.client, request)
        state, resumed = rest_of(request, whole[:20])
        for response in await read(service.client, resumed):
            state.take(response)
        assert state.done
        assert state.answers[0].token_ids == expected("hello", 30)
        assert len(prefill.prefills[-1].token_ids) == 12

        # That they are not what the client says is its own fault, and no worker's.
        resumed.resume.answers[0].token_ids[15] += 1
        with pytest.raises(grpc.aio.AioRpcError, match="token 15 of an answer is ") as raised:
            await read(service.client, resumed)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.control.lost == []
        await service.settle()


def broken_off(num_messages: int = 4) -> generation_pb2.GenerateRequest:
    """A resume of "hello" after so many tokens of 10."""
    request = ask("hello", 10, request_id="r")
    request.resume.start.seed, request.resume.start.max_tokens = SEED, 10
    request.resume.start.model_fingerprint = "f1"
    ids = expected("hello", num_messages)
    request.resume.answers.add(token_ids=ids, num_text_bytes=len(ids))
    return request


def set_fingerprint(r: generation_pb2.GenerateRequest) -> None:
    r.resume.start.model_fingerprint = "f2"


def set_no_start(r: generation_pb2.GenerateRequest) -> None:
    r.resume.ClearField("start")


def set_seed(r: generation_pb2.GenerateRequest) -> None:
    r.resume.start.seed = 9


def set_no_seed(r: generation_pb2.GenerateRequest) -> None:
    r.sampling.ClearField("seed")
    r.resume.start.seed = -1


def set_max_tokens(r: generation_pb2.GenerateRequest) -> None:
    r.resume.start.max_tokens = 11


def set_answers(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers.add(num_text_bytes=1)


def set_finished(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers[0].finished = True


def set_many_tokens(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers[0].token_ids.extend([1] * 7)


def set_token(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers[0].token_ids[2] = 320


def set_text(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers[0].num_text_bytes = 3


def set_negative_text(r: generation_pb2.GenerateRequest) -> None:
    r.resume.answers[0].num_text_bytes = -3


def set_stop(r: generation_pb2.GenerateRequest) -> None:
    r.sampling.stop.append(text_of(expected("hello", 3))[1:])


def set_stop_token(r: generation_pb2.GenerateRequest) -> None:
    r.sampling.stop_token_ids.append(expected("hello", 2)[1])


def set_no_id(r: generation_pb2.GenerateRequest) -> None:
    r.request_id = ""


def set_fingerprint_and_tokens(r: generation_pb2.GenerateRequest) -> None:
    set_fingerprint(r)
    r.resume.answers[0].token_ids[0] = 5_000  # of a larger vocabulary


def set_long_fingerprint(r: generation_pb2.GenerateRequest) -> None:
    r.resume.start.model_fingerprint = "f" * 129


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (set_fingerprint, "resume.start.model_fingerprint is 'f2', limit 'f1', that of the model"),
        (set_fingerprint_and_tokens, "resume.start.model_fingerprint is 'f2', limit 'f1', that"),
        (set_long_fingerprint, "resume.start.model_fingerprint has 129 chars, limit [1, 128]"),
        (set_no_start, "resume.start is not set, limit what the stream's first message had"),
        (set_seed, "resume.start.seed is 9, limit 3 (sampling.seed)"),
        (set_no_seed, "resume.start.seed is -1, limit [0, 9223372036854775807]"),
        (set_max_tokens, "resume.start.max_tokens is 11, limit [1, 10]"),
        (set_answers, "resume.answers has 2 entries, limit 1 (n)"),
        (set_finished, "resume.answers: all 1 are finished, limit 0"),
        (set_many_tokens, "resume.answers[0].token_ids has 11 entries, limit 10"),
        (set_token, "resume.answers[0].token_ids[2] is 320, limit [0, 319]"),
        (set_text, "resume.answers[0].num_text_bytes is 3, limit 4: so many have come"),
        (set_negative_text, "resume.answers[0].num_text_bytes is -3, limit [0, 2147483647]"),
        (set_stop, "resume.answers[0] has 4 tokens, limit 3: the answer ends there"),
        (set_stop_token, "resume.answers[0] has 4 tokens, limit 2: the answer ends there"),
        (set_no_id, "request_id is empty, limit at least 1 character: resume needs it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_a_wrong_resume_is_refused_by_name(
    spoil: Callable[[generation_pb2.GenerateRequest], None], sentence: str
) -> None:
    async with pair() as service:
        request = broken_off()
        spoil(request)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(service.client, request)
        assert sentence in (raised.value.details() or "")
        other_model = spoil in (set_fingerprint, set_fingerprint_and_tokens)
        assert raised.value.code() is (
            grpc.StatusCode.FAILED_PRECONDITION if other_model else grpc.StatusCode.INVALID_ARGUMENT
        )
        assert service.decodes[0].reserves == []
        await service.settle()


async def test_the_newer_call_of_an_id_takes_the_stream_over() -> None:
    async with pair(step_s=0.02) as service:
        request = ask("hello", 40, request_id="r")
        older: Responses = []

        async def read_older() -> None:
            async for response in service.client.generate(request, timeout_s=20):
                older.append(response)

        reading = asyncio.create_task(read_older())
        await until(lambda: len(older) > 5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(service.client, request)
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS

        state, resumed = rest_of(request, older[:5])
        at_most: list[int] = []
        async for response in service.client.generate(resumed, timeout_s=20):
            at_most.append(service.decodes[0].open_calls)
            state.take(response)
        assert state.done
        assert state.answers[0].token_ids == expected("hello", 40)
        assert max(at_most) == 1, "one live owner"
        with pytest.raises(grpc.aio.AioRpcError, match="a newer call resumed") as raised:
            await reading
        assert raised.value.code() is grpc.StatusCode.ABORTED
        assert len(older) < 30
        await service.settle()
        counters = service.router.counters
        assert (counters.completed, counters.cancelled, counters.refused) == (1, 1, 1)


async def test_of_three_calls_of_an_id_the_newest_goes_on() -> None:
    async with pair(step_s=0.02) as service:
        request = ask("hello", 30, request_id="r")
        request.resume.SetInParent()  # a client that heard nothing
        first, second = (asyncio.create_task(read(service.client, request)) for _ in range(2))
        await until(lambda: service.decodes[0].num_tokens_sent > 3)
        third = await read(service.client, request)
        assert [t for r in third for t in r.delta.token_ids] == expected("hello", 30)
        for call in (first, second):
            with pytest.raises(grpc.aio.AioRpcError, match="a newer call resumed"):
                await call
        await service.settle()


async def test_an_id_whose_older_call_does_not_end_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("legato.cluster.in_flight.GIVE_WAY_TIMEOUT_S", 0.1)
    async with pair() as service:
        owners, let_go = service.router._in_flight._owners, asyncio.Event()

        async def stubborn() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(60) as bound:
                    owner = owners["", "r"] = Ownership(("", "r"), bound, owners)
                    try:
                        await asyncio.sleep(60)
                    finally:
                        await let_go.wait()
                        owner.release()

        older = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="has not ended within") as raised:
            await read(service.client, broken_off())
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        let_go.set()
        await older
        assert len(await read(service.client, broken_off())) == 7
