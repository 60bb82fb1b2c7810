"""Every field that a caller could make as large as he likes has a limit, and a test beyond it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from google.protobuf import struct_pb2
from message_fields import fields, grows, inputs
from router_service import ask, collect
from text_service import TextService
from worker_pair import Attempt, running_pair, sampling

from legato.protos import (
    cluster_pb2,
    common_pb2,
    generation_pb2,
    kv_transfer_pb2,
    worker_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANY = 100_000
MOST_SHOWN_CHARS = 1000  # of an error
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
Message = Any
PREFILL, DECODE, LINK = "PrefillWorker/Prefill", "DecodeWorker/Decode", "KvTransfer/Link"


# By path below SamplingParams: each kind of guide beyond its limit.
GUIDES = {
    "guide.json_schema": common_pb2.Guide(json_schema='{"const": "' + "x" * MANY + '"}'),
    "guide.regex": common_pb2.Guide(regex="x" * MANY),
    "guide.choice.texts": common_pb2.Guide(choice=common_pb2.GuideChoice(texts=["x"] * MANY)),
    "guide.grammar": common_pb2.Guide(grammar='start: "' + "x" * MANY + '"'),
}


def generate(**settings: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401  # of the message
    return generation_pb2.GenerateRequest(text="hi", **settings)


def with_sampling(**settings: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401  # of the message
    return generate(sampling=common_pb2.SamplingParams(**settings))


def chat(*messages: generation_pb2.ChatMessage) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(messages=generation_pb2.ChatMessages(messages=messages))


def resumed(**settings: Any) -> generation_pb2.GenerateRequest:  # noqa: ANN401  # of the message
    start = generation_pb2.StreamStart(max_tokens=8, model_fingerprint="f1")
    resume = generation_pb2.Resume(**{"start": start, **settings})
    return generation_pb2.GenerateRequest(text="hi", request_id="r", resume=resume)


SAY = generation_pb2.ChatMessage(role="user", content="hi")
LONG_ANSWER = generation_pb2.ReceivedAnswer(token_ids=[1] * MANY)
# By method and path: a message in which that field is beyond its limit.
PUBLIC: dict[str, dict[str, Message]] = {
    "Generation/Generate": {
        "request_id": generate(request_id="x" * MANY),
        "text": generation_pb2.GenerateRequest(text="x" * (3 << 20)),
        "token_ids.ids": generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[1] * MANY)
        ),
        "messages.messages": chat(*[SAY] * MANY),
        "messages.messages.role": chat(generation_pb2.ChatMessage(role="x" * MANY, content="hi")),
        "messages.messages.content": chat(
            generation_pb2.ChatMessage(role="user", content="x" * (3 << 20))
        ),
        "sampling.stop": with_sampling(stop=["x"] * MANY),
        "sampling.stop (one)": with_sampling(stop=["x" * (1 << 20)]),
        "sampling.stop_token_ids": with_sampling(stop_token_ids=[1] * MANY),
        "sampling.logit_bias": with_sampling(logit_bias=dict.fromkeys(range(MANY), 1.0)),
        **{
            f"sampling.{path}": with_sampling(
                guide=guide,
            )
            for path, guide in GUIDES.items()
        },
        "cache_salt": generate(cache_salt="x" * MANY),
        "resume.start.model_fingerprint": resumed(
            start=generation_pb2.StreamStart(max_tokens=8, model_fingerprint="x" * MANY)
        ),
        "resume.answers": resumed(answers=[generation_pb2.ReceivedAnswer(token_ids=[1])] * MANY),
        "resume.answers.token_ids": resumed(answers=[LONG_ANSWER]),
    },
    "Generation/GetModel": {},
    "Generation/Tokenize": {
        "text": generation_pb2.TokenizeRequest(text="x" * (3 << 20)),
        "messages.messages": generation_pb2.TokenizeRequest(
            messages=generation_pb2.ChatMessages(messages=[SAY] * MANY)
        ),
        "messages.messages.role": generation_pb2.TokenizeRequest(
            messages=chat(generation_pb2.ChatMessage(role="x" * MANY, content="hi")).messages
        ),
        "messages.messages.content": generation_pb2.TokenizeRequest(
            messages=chat(generation_pb2.ChatMessage(role="user", content="x" * (3 << 20))).messages
        ),
    },
    "Generation/Detokenize": {
        "token_ids": generation_pb2.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1)),
    },
    "Cluster/GetStatus": {},
    "Cluster/ScalePool": {
        "targets": cluster_pb2.ScalePoolRequest(
            targets=[cluster_pb2.PoolTarget(role=common_pb2.WORKER_ROLE_PREFILL, target=1)] * MANY
        ),
    },
    "Cluster/ChangeRole": {
        "worker_id": cluster_pb2.ChangeRoleRequest(
            worker_id="x" * MANY, role=common_pb2.WORKER_ROLE_DECODE
        ),
    },
    "Cluster/DrainNode": {"node": cluster_pb2.DrainNodeRequest(node="x" * MANY)},
    "Cluster/DrainWorker": {"worker_id": cluster_pb2.DrainWorkerRequest(worker_id="x" * MANY)},
    "Cluster/Shutdown": {},
}

# Numbers that stand for work or memory, at values far beyond their limits.
NUMBERS = {
    "n": generate(n=1_000_000),
    "sampling.logprobs": with_sampling(logprobs=1_000_000),
    "sampling.max_tokens": with_sampling(max_tokens=-1),
    "sampling.min_tokens": with_sampling(min_tokens=2**31 - 1, max_tokens=4),
    "sampling.top_k": with_sampling(top_k=-1),
    "priority": generate(priority=99),
}


def key(request_id: str = "r") -> worker_pb2.AttemptKey:
    return worker_pb2.AttemptKey(request_id=request_id)


def prefill(**settings: Any) -> worker_pb2.PrefillCommand:  # noqa: ANN401  # of the message
    whole = {"key": key(), "token_ids": [1, 2], "num_prompt_tokens": 2, "sampling": sampling(4)}
    request = worker_pb2.PrefillRequest(**{**whole, **settings})
    return worker_pb2.PrefillCommand(request=request)


def reserve(**settings: Any) -> worker_pb2.DecodeCommand:  # noqa: ANN401  # of the message
    whole = {"key": key(), "token_ids": [1, 2], "num_prompt_tokens": 2, "sampling": sampling(4)}
    return worker_pb2.DecodeCommand(reserve=worker_pb2.Reserve(**{**whole, **settings}))


def ticket(**settings: Any) -> worker_pb2.KvTicket:  # noqa: ANN401  # of the message
    return worker_pb2.KvTicket(**{"key": key(), "epoch": 1, "worker_id": "d", **settings})


def handed(**settings: Any) -> worker_pb2.PrefillCommand:  # noqa: ANN401  # of the message
    return prefill(**{"ticket": ticket(), "decode_address": "127.0.0.1:1", **settings})


def of_request(make: Callable[..., Message], where: str) -> dict[str, Message]:
    """What a PrefillRequest and a Reserve have alike."""
    return {
        f"{where}.key.request_id": make(key=key("x" * MANY)),
        f"{where}.token_ids": make(token_ids=[1] * MANY, num_prompt_tokens=MANY),
        f"{where}.sampling.stop": make(sampling=sampling(4, stop=["x"] * MANY)),
        f"{where}.sampling.stop (one)": make(sampling=sampling(4, stop=["x" * MANY])),
        f"{where}.sampling.stop_token_ids": make(sampling=sampling(4, stop_token_ids=[1] * MANY)),
        f"{where}.sampling.logit_bias": make(
            sampling=sampling(4, logit_bias=dict.fromkeys(range(MANY), 1.0))
        ),
        **{
            f"{where}.sampling.{path}": make(sampling=sampling(4, guide=guide))
            for path, guide in GUIDES.items()
        },
        f"{where}.eos_token_ids": make(eos_token_ids=[1] * MANY),
        f"{where}.cache_salt": make(cache_salt="x" * MANY),
    }


def hello(**settings: Any) -> kv_transfer_pb2.KvFrame:  # noqa: ANN401  # of the message
    return kv_transfer_pb2.KvFrame(hello=kv_transfer_pb2.KvHello(**settings))


# All but the rows of a frame is within one limit: see KvTransfer.
FRAMES = {
    **{
        f"hello.{name}": hello(**{name: "x" * MANY})
        for name in ("sender_worker_id", "receiver_worker_id", "model_fingerprint", "weights")
    },
    "hello.kv_wire": hello(kv_wire="x" * MANY),
    "hello.layout.dtype": hello(layout=worker_pb2.KvLayout(dtype="x" * MANY)),
    "hello.memory.token": hello(memory=kv_transfer_pb2.KvMemory(token=b"x" * MANY)),
    "open.ticket.key.request_id": kv_transfer_pb2.KvFrame(
        open=kv_transfer_pb2.KvOpen(ticket=ticket(key=key("x" * MANY)))
    ),
    "open.ticket.worker_id": kv_transfer_pb2.KvFrame(
        open=kv_transfer_pb2.KvOpen(ticket=ticket(worker_id="x" * MANY))
    ),
    "rows.data": kv_transfer_pb2.KvFrame(rows=kv_transfer_pb2.KvRows(data=b"x" * (17 << 20))),
}
INTERNAL: dict[str, dict[str, Message]] = {
    PREFILL: {
        **of_request(prefill, "request"),
        "request.ticket.key.request_id": handed(ticket=ticket(key=key("x" * MANY))),
        "request.ticket.worker_id": handed(ticket=ticket(worker_id="x" * MANY)),
        "request.decode_address": handed(decode_address="x" * MANY),
    },
    DECODE: of_request(reserve, "reserve"),
    LINK: FRAMES,
    "WorkerControl/GetIdentity": {},
    "WorkerControl/WatchLoad": {},
    "WorkerControl/Drain": {},
}
# In the midst of a call, each with a test of its own below.
LATER = {
    PREFILL: {
        "retarget.ticket.key.request_id",
        "retarget.ticket.worker_id",
        "retarget.decode_address",
    },
    DECODE: {
        "start.answers",
        "move.ticket.key.request_id",
        "move.ticket.worker_id",
        "move.decode_address",
    },
}


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ((generation_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR), PUBLIC),
        ((worker_pb2.DESCRIPTOR, kv_transfer_pb2.DESCRIPTOR), INTERNAL),
    ],
)
def test_no_field_can_grow_without_a_limit(
    files: tuple[Any, ...], known: dict[str, dict[str, Message]]
) -> None:
    found = {
        method: {path for path, field in fields(message) if grows(field)}
        for method, message in inputs(files).items()
    }
    listed = {
        method: {path.partition(" ")[0] for path in paths} | LATER.get(method, set())
        for method, paths in known.items()
    }
    assert found == listed


def test_what_nests_without_an_end_would_be_found() -> None:
    with pytest.raises(AssertionError, match="nests without an end"):
        list(fields(struct_pb2.ListValue.DESCRIPTOR))


# Routers.

PUBLIC_CASES = [(m, p, message) for m, paths in PUBLIC.items() for p, message in paths.items()]


async def end_of(
    channel: grpc.aio.Channel, method: str, message: Message
) -> tuple[grpc.StatusCode, str]:
    call = channel.unary_stream(f"/legato.v1.{method}")(message.SerializeToString(), timeout=20)
    return await read_out(call)


async def read_out(call: Any) -> tuple[grpc.StatusCode, str]:  # noqa: ANN401  # of any kind
    """How it ends."""
    async with asyncio.timeout(20):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    return await call.code(), await call.details() or ""


def check_refused(code: grpc.StatusCode, details: str, path: str) -> None:
    assert code in REFUSED, (path, code, details)
    assert len(details) <= MOST_SHOWN_CHARS, path
    said = ("limit", "exceed", "larger than max")
    assert any(word in details for word in said), (path, details)


async def test_whatever_is_beyond_its_limit_is_refused_at_once(tmp_path: Path) -> None:
    async with TextService(tmp_path) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            await end_of(channel, "Generation/Generate", generate())
            memory = psutil.Process().memory_info().rss
            for method, path, message in PUBLIC_CASES:
                began_s = time.monotonic()
                code, details = await end_of(channel, method, message)
                took_s = time.monotonic() - began_s
                check_refused(code, details, path)
                assert took_s < 5, path  # a second of a machine that has nothing else to do
                assert path.partition(" ")[0].rpartition(".")[2] in details or "." in path, details
            for path, message in NUMBERS.items():
                code, details = await end_of(channel, "Generation/Generate", message)
                check_refused(code, details, path)
                assert path in details
            assert psutil.Process().memory_info().rss - memory < 100 << 20
        await service.settle()
        assert service.router.counters.failed == 0
        whole = await collect(service, ask("hello", 4))  # type: ignore[arg-type]  # has a client, too
        assert len(whole.token_ids) == 4


async def test_a_message_larger_than_any_is_refused_by_its_size(tmp_path: Path) -> None:
    async with TextService(tmp_path) as service:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            memory = psutil.Process().memory_info().rss
            text = "x" * (100 << 20)
            message = generation_pb2.GenerateRequest(text=text)
            code, details = await end_of(channel, "Generation/Generate", message)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in details
            # The text itself, its message and gRPC's copy are the sender's, who is this process.
            assert psutil.Process().memory_info().rss - memory < 500 << 20
        await service.settle()


# Workers.


@pytest.mark.parametrize("method", list(INTERNAL))
async def test_workers_refuse_at_once_what_is_beyond_its_limit(method: str) -> None:
    async with running_pair(p={"num_blocks": 128}, d={"num_blocks": 128}) as pair:
        worker = pair.p if method == PREFILL else pair.d
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(worker.address, options=options) as channel:
            for path, message in INTERNAL[method].items():
                began_s = time.monotonic()
                code, details = await end_of(channel, method, message)
                check_refused(code, details, path)
                assert time.monotonic() - began_s < 5, path
        await pair.until_idle()
        assert len(await Attempt(pair, range(1, 9), sampling(3)).run()) == 3


BAD_TICKETS = (
    ({"key": key("x" * MANY)}, "127.0.0.1:1", "key"),
    ({"worker_id": "x" * MANY}, "127.0.0.1:1", "worker_id"),
    ({}, "x" * MANY, "decode_address"),
)


@pytest.mark.parametrize(("settings", "address", "field"), BAD_TICKETS)
async def test_a_retarget_has_the_limits_of_a_request(
    settings: dict[str, Any], address: str, field: str
) -> None:
    async with running_pair(p={"num_blocks": 128}, d={"num_blocks": 128}) as pair:
        attempt = Attempt(pair, range(1, 9), sampling(3))
        await attempt.reserve()
        attempt.start_prefill("127.0.0.1:1")  # nobody is there: the call goes on
        await attempt.first_token()
        await attempt.retarget(ticket(**settings), address)
        code, details = await read_out(attempt.prefill_call._call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert field in details
        assert len(details) <= MOST_SHOWN_CHARS
        attempt.decode_call.cancel()
        await pair.until_idle()


@pytest.mark.parametrize(("settings", "address", "field"), BAD_TICKETS)
async def test_a_move_has_the_limits_of_a_request(
    settings: dict[str, Any], address: str, field: str
) -> None:
    await _in_a_decode_call(
        worker_pb2.DecodeCommand(
            move=worker_pb2.Move(number=1, ticket=ticket(**settings), decode_address=address)
        ),
        field,
    )


async def test_a_start_names_each_answer_once() -> None:
    answers = [worker_pb2.StartAnswer(token_id=1)] * MANY
    await _in_a_decode_call(
        worker_pb2.DecodeCommand(start=worker_pb2.Start(answers=answers)), "answers", starts=False
    )


async def _in_a_decode_call(
    command: worker_pb2.DecodeCommand, field: str, *, starts: bool = True
) -> None:
    async with running_pair(p={"num_blocks": 128}, d={"num_blocks": 128}) as pair:
        attempt = Attempt(pair, range(1, 9), sampling(60))
        await attempt.reserve()
        if starts:
            await attempt.start_decode({0: 1})
        await attempt.decode_call.write(command)
        code, details = await read_out(attempt.decode_call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert field in details
        assert len(details) <= MOST_SHOWN_CHARS
        await pair.until_idle()
