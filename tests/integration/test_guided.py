"""Answers that keep to a guide over real worker processes: handed off, moved, replayed, resumed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import jsonschema
import pytest
import pytest_asyncio
from cut_streams import check_every_cut
from demo_model import demo_model_path
from guide_cases import CASES, JSON_OBJECT, SHORT, Case, regex_case
from local_service import NO_PROXY, Answer, LocalService, collect, request
from raw_client import RawClient
from tiny_models import EOS, make_llama_folder

from legato.cluster.config import RouterOptions
from legato.protos import common_pb2, generation_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 5.0, "seed": 7},
    {"temperature": 3.0, "seed": 8, "repetition_penalty": 1.2, "presence_penalty": 0.4},
)


def guided(case: Case, number: int, max_tokens: int = 150, **sampling: Any) -> Any:  # noqa: ANN401  # fields of the message
    settings = {**WAYS[number % len(WAYS)], "max_tokens": max_tokens, **sampling}
    return request(f"prompt {number} of {case.name}", guide=case.message, **settings)


async def ask(service: LocalService, message: generation_pb2.GenerateRequest) -> Answer:
    return await collect(service.generation.Generate(message, timeout=120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=2048)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(folder: Path) -> AsyncIterator[LocalService]:
    async with LocalService(folder, decode=2) as service:
        yield service
        await service.wait_idle()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(folder: Path) -> AsyncIterator[dict[tuple[str, int], Answer]]:
    """Each case in each way, from one process, one after the other."""
    async with LocalService(folder, prefill=0, decode=0, colocated=1) as service:
        yield {
            (case.name, number): await ask(service, guided(case, number))
            for case in CASES
            for number in range(len(WAYS))
        }


async def check_against(service: LocalService, alone: dict[tuple[str, int], Answer]) -> None:
    """All at once."""
    keys = [(case, number) for case in CASES for number in range(len(WAYS))]
    answers = await asyncio.gather(*(ask(service, guided(*key)) for key in keys))
    num_whole = 0
    for (case, number), answer in zip(keys, answers, strict=True):
        right = alone[case.name, number]
        assert answer.token_ids == right.token_ids, case.name
        assert answer.text == right.text
        assert [top.logprob for top in answer.logprobs] == [top.logprob for top in right.logprobs]
        if answer.done.finish_reason == common_pb2.FINISH_REASON_STOP:
            num_whole += 1
            assert case.keeps(answer.text), (case.name, answer.text)
            assert answer.token_ids[-1] == EOS
        else:
            assert len(answer.token_ids) == 150
    assert num_whole >= 30


async def test_pools_answer_as_one_process_does(
    service: LocalService, alone: dict[tuple[str, int], Answer]
) -> None:
    await check_against(service, alone)
    assert sum(load.kv_transfers_completed for _, load in await service.loads()) > 30


async def test_local_prefill_answers_as_one_process_does(
    folder: Path, alone: dict[tuple[str, int], Answer]
) -> None:
    options = RouterOptions(port=0, local_prefill_tokens=64)
    async with LocalService(folder, options=options) as service:
        await check_against(service, alone)


async def test_several_answers_to_one_prompt(service: LocalService) -> None:
    for case in CASES[:6]:
        message = guided(case, 1)
        message.n = 4
        texts: list[str] = [""] * 4
        reasons: list[int] = [0] * 4
        async for response in service.generation.Generate(message, timeout=60):
            texts[response.index] += response.delta.text
            if response.HasField("finish"):
                reasons[response.index] = response.finish.finish_reason
        for index, text in enumerate(texts):
            assert reasons[index] != common_pb2.FINISH_REASON_STOP or case.keeps(text)
            message = guided(case, 1, seed=7 + index)
            assert (await ask(service, message)).text == text


# --- what ends an answer -------------------------------------------------------------------------


async def test_what_ends_an_answer(service: LocalService) -> None:
    letters = regex_case("letters", "[a-z]{4,40}")
    stop, length = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH

    async def ended(**sampling: Any) -> tuple[str, int]:  # noqa: ANN401  # fields of the message
        answer = await ask(service, guided(letters, 1, **{"max_tokens": 60, **sampling}))
        return answer.text, answer.done.finish_reason

    # As long as it may be: EOS is held back, and then nothing else is left.
    for more in ({"ignore_eos": True}, {"min_tokens": 55}, {"logit_bias": {EOS: -100.0}}):
        text, reason = await ended(**more)
        assert (len(text), reason) == (40, stop)
        assert letters.keeps(text)
    text, reason = await ended(logit_bias={EOS: 100.0})
    assert (len(text), reason) == (4, stop)
    text, reason = await ended(logit_bias={EOS: 100.0}, min_tokens=12)
    assert (len(text), reason) == (12, stop)
    assert (await ended(max_tokens=3))[1] == length
    assert (await ended(max_tokens=1))[1] == length
    whole, _ = await ended(ignore_eos=True)
    cut, reason = await ended(ignore_eos=True, stop=[whole[10:13]])
    assert reason == stop
    assert whole.startswith(cut)
    assert len(cut) <= 10


async def test_what_is_wrong_is_said_at_the_door(service: LocalService) -> None:
    choice = common_pb2.GuideChoice
    guides = [
        ({}, "sampling.guide is empty, limit exactly one of"),
        ({"json_object": False}, "sampling.guide.json_object is False"),
        ({"regex": ""}, "sampling.guide.regex is empty"),
        ({"regex": "a(b"}, "sampling.guide.regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "sampling.guide.regex: .*look-around"),
        ({"regex": "a" * 70_000}, "sampling.guide has 700.. bytes, limit 65536"),
        ({"regex": r"[^\s\S]"}, "sampling.guide.regex: no text that the model can write"),
        ({"choice": choice(texts=[])}, r"choice.texts has 0 entries, limit \[1, 1024\]"),
        ({"choice": choice(texts=["a"] * 1025)}, "choice.texts has 1025 entries"),
        ({"choice": choice(texts=["a", ""])}, r"choice.texts\[1\] is empty"),
        ({"json_schema": "{"}, "json_schema is '{', no JSON"),
        ({"json_schema": "3"}, "json_schema is '3', limit a JSON object"),
        ({"json_schema": '{"items":' * 65 + "{}" + "}" * 65}, "nested 65 deep or deeper, limit 64"),
        ({"json_schema": '{"type": "strong"}'}, "sampling.guide.json_schema: "),
        ({"json_schema": "false"}, "json_schema is 'false', limit a JSON object"),
        ({"json_schema": '{"not": {}}'}, "the keyword 'not', which is not understood"),
        ({"regex": ".*" * 257}, "regex has 257 repetitions, options and multiples, limit 256"),
        ({"json_schema": '{"type":"string","minLength":3,"maxLength":2}'}, "Unsatisfiable schema"),
        ({"json_schema": '{"$ref": "http://example.com/x"}'}, "json_schema: .*does not fetch"),
        ({"grammar": "start: other"}, "sampling.guide.grammar: "),
        ({"grammar": "start: <[256]>"}, "grammar: no text of at least one token"),
    ]
    for fields, what in guides:
        message = request("x", max_tokens=5, guide=common_pb2.Guide(**fields))
        started_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(service, message)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
        assert re.search(what, error.value.details() or ""), error.value.details()
        assert len(error.value.details() or "") < 400
        assert time.monotonic() - started_s < 5
    await service.wait_idle()


async def test_what_becomes_too_complex_ends_alone_and_says_so(service: LocalService) -> None:
    bomb = guided(regex_case("bomb", "(a{1,1000}){1,1000}"), 0, ignore_eos=True)
    others = [guided(CASES[0], number) for number in range(4)]
    results = await asyncio.gather(
        *(ask(service, message) for message in (bomb, *others)), return_exceptions=True
    )
    assert isinstance(results[0], grpc.aio.AioRpcError)
    assert results[0].code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "it became too complex at output position" in (results[0].details() or "")
    assert all(isinstance(result, Answer) for result in results[1:])
    await service.wait_idle()


async def test_a_worker_survives_whatever_reaches_it(service: LocalService) -> None:
    """Past the router."""
    worker = next(worker for worker in service.workers if worker.role == "prefill")
    complete = {
        **dict.fromkeys(("temperature", "min_p", "presence_penalty"), 0.0),
        "frequency_penalty": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "top_k": 0,
        "seed": 0,
        "ignore_eos": False,
        "min_tokens": 0,
        "max_tokens": 1,
    }
    guides = [
        {"regex": "a(b"},
        {"regex": ".*" * 20_000},
        {"regex": "(" * 30_000 + "a" + ")" * 30_000},
        {"json_schema": "[" * 60_000},
        {"json_schema": json.dumps({"allOf": [{"pattern": f"^.*{i}.*$"} for i in range(99)]})},
        {"grammar": "start: " + "(" * 20_000},
        {"grammar": '{"grammars": []}'},
        {},
        {"regex": "a+"},  # and it serves on
    ]
    async with grpc.aio.insecure_channel(worker.address, options=NO_PROXY) as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        for number, fields in enumerate(guides):
            prefill = worker_pb2.PrefillRequest(
                key=worker_pb2.AttemptKey(request_id=f"hostile {number}"),
                token_ids=[1, 2, 3],
                num_prompt_tokens=3,
                eos_token_ids=[EOS],
                sampling=common_pb2.SamplingParams(
                    **complete,  # type: ignore[arg-type]  # of its fields
                    guide=common_pb2.Guide(**fields),  # type: ignore[arg-type]  # of its fields
                ),
            )
            call = stub.Prefill(iter([worker_pb2.PrefillCommand(request=prefill)]), timeout=30)
            if fields == guides[-1]:
                event = await call.read()
                assert event.first_token.answers[0].token.token_id == ord("a")
                continue
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
    await service.wait_idle()


# --- from one place to another -------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[10]], ids=lambda case: case.name)
async def test_every_cut_of_a_stream(service: LocalService, case: Case) -> None:
    async with (
        service.another_router() as (_, address),
        RawClient(service.address) as first,
        RawClient(address) as other,
    ):
        for number in range(len(WAYS)):
            message = guided(case, number, max_tokens=30)
            message.request_id = f"{case.name} {number}"
            await check_every_cut(first, other, message, step=3)


async def test_what_no_answer_can_have_had_cannot_be_resumed(service: LocalService) -> None:
    message = guided(CASES[7], 0, request_id="cut")  # digits
    first = [r async for r in service.generation.Generate(message, timeout=60)]
    message.resume.start.CopyFrom(first[0].start)
    message.resume.answers.add(token_ids=list(b"12x"), num_text_bytes=3)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(service, message)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith(
        "resume.answers[0].token_ids: token 120 at output position 2 is not what the guide allows"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
async def test_a_decode_worker_goes_in_the_middle(folder: Path, number: signal.Signals) -> None:
    """Killed: prompt and tokens are replayed elsewhere. Drained: its streams move with their KV."""
    long = regex_case("long", "([a-z]{1,9} ){60,120}[a-z]{900}")
    async with LocalService(folder, decode=3) as service:
        messages = [guided(long, i, max_tokens=700, ignore_eos=True) for i in range(9)]
        alone = [await ask(service, message) for message in messages]
        streams = [service.generation.Generate(message, timeout=120) for message in messages]
        answers = [Answer() for _ in messages]

        async def read(index: int) -> None:
            async for response in streams[index]:
                answers[index].take(response)

        reading = asyncio.gather(*(read(index) for index in range(len(messages))))
        async with asyncio.timeout(60):
            while min(len(answer.token_ids) for answer in answers) < 60:  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.002)
        assert not any(answer.finish for answer in answers), "too late"
        decode = next(worker for worker in service.workers if worker.role == "decode")
        decode.process.signal(number)
        await reading
        moved = sum(answer.done.timings.attempts > 1 for answer in answers)
        carried = sum(answer.done.timings.moves for answer in answers)
        assert carried if number == signal.SIGTERM else moved
        for answer, right in zip(answers, alone, strict=True):
            assert answer.token_ids == right.token_ids
            assert re.fullmatch(r"([a-z]{1,9} )*[a-z]*", answer.text)


# --- a real model --------------------------------------------------------------------------------


async def test_the_demo_model_fills_in_forms(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "country": SHORT,
            "population": {"type": "integer", "minimum": 0},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "country", "population", "capital"],
        "additionalProperties": False,
    }
    case = Case("form", common_pb2.Guide(json_schema=json.dumps(schema)), lambda text: True)
    async with LocalService(demo_model_path(), worker_args=["--context-length", "1024"]) as service:

        async def answer(case: Case, **sampling: Any) -> Answer:  # noqa: ANN401  # fields of the message
            message = generation_pb2.GenerateRequest(
                sampling=common_pb2.SamplingParams(
                    guide=case.message, **{"max_tokens": 200, "temperature": 0.0, **sampling}
                )
            )
            message.messages.messages.add(role="user", content="Tell me of Paris, as JSON.")
            return await ask(service, message)

        asked: list[dict[str, Any]] = [{}, *({"temperature": 1.0, "seed": i} for i in range(5))]
        forms = await asyncio.gather(*(answer(case, **sampling) for sampling in asked))
        for form in forms:
            assert form.done.finish_reason == common_pb2.FINISH_REASON_STOP, form.text
            jsonschema.validate(json.loads(form.text), schema)
        dates = await asyncio.gather(
            *(answer(CASES[8], temperature=1.0, seed=i) for i in range(3)),
            *(answer(JSON_OBJECT, temperature=0.0, max_tokens=60) for _ in range(1)),
        )
        assert all(CASES[8].keeps(date.text) for date in dates[:3])
        begun = dates[3]
        assert begun.text.startswith("{")
