"""A prompt's logprobs are asked for once and told once, whatever happens to workers and streams."""

from __future__ import annotations

import math

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Service, ask, expected

from legato.cluster import prompt_logprobs
from legato.protos import common_pb2, generation_pb2, worker_pb2

PROMPT = "hello"


def request(max_tokens: int = 12, count: int = 2, **more: object) -> generation_pb2.GenerateRequest:
    message = ask(PROMPT, max_tokens, **more)  # type: ignore[arg-type]  # checked by protobuf
    message.sampling.prompt_logprobs = count
    return message


def entries(count: int = 2, prompt: str = PROMPT) -> list[common_pb2.TokenLogprobs]:
    """As the fake workers have them."""
    return [
        common_pb2.TokenLogprobs(),
        *(
            common_pb2.TokenLogprobs(
                logprob=-math.inf if place == 2 else -place,
                top=[
                    common_pb2.TopLogprob(token_id=place + rank, logprob=-rank)
                    for rank in range(count)
                ],
            )
            for place in range(1, len(prompt))
        ),
    ]


async def told(
    service: Service, message: generation_pb2.GenerateRequest
) -> list[generation_pb2.GenerateResponse]:
    """All messages; the first one alone may tell of the prompt."""
    responses = [r async for r in service.client.generate(message, timeout_s=20)]
    assert all(not response.prompt_logprobs for response in responses[1:])
    return responses


def tokens(responses: list[generation_pb2.GenerateResponse], index: int = 0) -> list[int]:
    return [t for r in responses if r.index == index for t in r.delta.token_ids]


def wishes(
    requests: list[worker_pb2.PrefillRequest] | list[worker_pb2.Reserve],
) -> list[int | None]:
    return [
        r.sampling.prompt_logprobs if r.sampling.HasField("prompt_logprobs") else None
        for r in requests
    ]


@pytest.mark.parametrize("many", [1, 10**6])
async def test_they_come_with_the_first_message(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(prompt_logprobs, "MANY_NUMBERS", many)
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    async with Service([prefill], [decode]) as service:
        responses = await told(service, request())
        assert list(responses[0].prompt_logprobs) == entries()
        assert not responses[0].prompt_logprobs[0].HasField("logprob")
        assert responses[0].prompt_logprobs[2].logprob == -math.inf
        assert tokens(responses) == expected(PROMPT, 12)
        assert (wishes(prefill.prefills), wishes(decode.reserves)) == ([2], [None])
        await service.settle()


async def test_without_the_wish_nothing_is_told_of_the_prompt() -> None:
    prefill = FakeWorker("prefill")
    async with Service([prefill], [FakeWorker("decode")]) as service:
        responses = await told(service, ask(PROMPT, 3))
        assert not responses[0].prompt_logprobs
        assert wishes(prefill.prefills) == [None]


async def test_several_answers_have_one_prompt() -> None:
    prefill = FakeWorker("prefill")
    async with Service([prefill], [FakeWorker("decode")]) as service:
        responses = await told(service, request(6, n=3))
        assert list(responses[0].prompt_logprobs) == entries()
        for index in range(3):
            assert tokens(responses, index) == expected(PROMPT, 6, index)
        assert wishes(prefill.prefills) == [2]


async def test_a_prefill_that_failed_has_told_nothing_and_the_next_is_asked() -> None:
    prefills = [FakeWorker("prefill"), FakeWorker("prefill")]
    for worker in prefills:
        worker.faults.fail_prefills = 1
    async with Service(prefills, [FakeWorker("decode")]) as service:
        responses = await told(service, request())
        assert list(responses[0].prompt_logprobs) == entries()
        assert tokens(responses) == expected(PROMPT, 12)
        assert sorted(wishes([p for w in prefills for p in w.prefills]), key=str) == [2, 2, 2]


async def test_a_replay_is_not_asked_again() -> None:
    prefill = FakeWorker("prefill")
    decodes = [FakeWorker("decode", step_s=0.01), FakeWorker("decode", step_s=0.01)]
    async with Service([prefill], decodes) as service:
        responses: list[generation_pb2.GenerateResponse] = []
        async for response in service.client.generate(request(30), timeout_s=20):
            responses.append(response)
            if len(tokens(responses)) == 5:
                await next(worker for worker in decodes if worker.used_blocks).die()
        assert list(responses[0].prompt_logprobs) == entries()
        assert all(not response.prompt_logprobs for response in responses[1:])
        assert tokens(responses) == expected(PROMPT, 30)
        assert wishes(prefill.prefills) == [2, None]


async def test_a_prompt_alone_ends_with_one_message_and_needs_no_decode_worker() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    async with Service([prefill], [decode]) as service:
        [response] = await told(service, request(0, 0))
        assert list(response.prompt_logprobs) == entries(0)
        assert response.HasField("start")
        assert response.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
        usage = response.finish.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 0)
        assert decode.reserves == []
        await service.settle()


async def test_a_prompt_of_one_token_has_one_entry_without_a_logprob() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        message = ask("x", 0)
        message.sampling.prompt_logprobs = 3
        [response] = await told(service, message)
        assert list(response.prompt_logprobs) == [common_pb2.TokenLogprobs()]


async def test_a_resumed_stream_has_them_only_where_nothing_had_come() -> None:
    prefill = FakeWorker("prefill")
    async with Service([prefill], [FakeWorker("decode")]) as service:
        responses = await told(service, request(request_id="r"))
        anew = request(request_id="r")
        anew.resume.SetInParent()
        assert list((await told(service, anew))[0].prompt_logprobs) == entries()
        rest = request(request_id="r")
        rest.resume.start.CopyFrom(responses[0].start)
        rest.resume.answers.add(
            token_ids=responses[0].delta.token_ids,
            num_text_bytes=len(responses[0].delta.text.encode()),
        )
        resumed = await told(service, rest)
        assert not resumed[0].prompt_logprobs
        assert tokens(responses[:1]) + tokens(resumed) == expected(PROMPT, 12)
        assert wishes(prefill.prefills) == [2, 2, None]


async def test_a_worker_that_leaves_some_out_breaks_the_protocol() -> None:
    prefill = FakeWorker("prefill")
    prefill.faults.lose_scores = 1
    async with Service([prefill], [FakeWorker("decode")]) as service:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await told(service, request())
        assert error.value.code() is grpc.StatusCode.INTERNAL
        await service.settle()


async def test_a_decode_worker_never_computes_such_a_prompt_itself() -> None:
    """Another one it would: a token costs next to nothing there."""
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    decode.local_prefill_token_s = 1e-9
    async with Service([prefill], [decode], local_prefill_tokens=64) as service:
        await told(service, ask("first", 3))  # the remote way is measured
        await told(service, ask(PROMPT, 3))
        assert list((await told(service, request()))[0].prompt_logprobs) == entries()
        assert [start.local_prefill for start in decode.starts] == [False, True, False]


async def test_a_colocated_worker_is_told_with_the_reserve() -> None:
    colocated = FakeWorker("colocated")
    async with Service([], [colocated]) as service:
        await service.client.wait_ready(5)
        responses = await told(service, request(6, n=2))
        assert list(responses[0].prompt_logprobs) == entries()
        assert wishes(colocated.reserves) == [2, None]
        for index in range(2):
            assert tokens(responses, index) == expected(PROMPT, 6, index)
