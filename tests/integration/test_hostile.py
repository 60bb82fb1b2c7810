"""What strangers and odd surroundings do to a service: floods, garbage, proxies, silence."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_engine import fake_loaded, fake_sample
from fake_worker import FakeWorker
from local_service import LocalService, collect
from local_service import request as greedy_request
from router_service import Service, ask
from router_service import collect as collect_fake
from tiny_models import make_llama_folder
from worker_pair import running_pair, running_worker, sampling

from legato.cluster.cli.memory_size import parse_fraction, parse_size
from legato.cluster.sampling_rules import shown_float
from legato.protos import worker_pb2
from legato.worker.byte_size import parse_byte_size, parse_byte_size_or_0
from legato.worker.byte_size import parse_fraction as read_fraction
from legato.worker.config import WorkerConfig
from legato.worker.server import WorkerServer
from legato.worker.services import call_limit

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration


async def test_a_burst_beyond_grpcs_own_backlog_is_answered_by_our_queue() -> None:
    # gRPC drops calls beyond 1,000 not yet taken up, at random, as CANCELLED and without a word.
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        codes: Counter[str] = Counter()

        async def one() -> None:
            try:
                await collect_fake(service, ask("hello", 1))
                codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1

        await asyncio.gather(*(one() for _ in range(1500)))
        assert sum(codes.values()) == 1500
        assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}, codes
        assert codes["OK"] > 0


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("/legato.v1.Generation/Generate", b"\x12\x02\xff\xfe"),  # a text that is not UTF-8
        ("/legato.v1.Generation/GetModel", b"\xff"),
        ("/legato.v1.Cluster/GetStatus", b"\x80\x04\x95\x1e\x00"),  # how a pickle begins
        ("/grpc.health.v1.Health/Check", b"\x0a\x7f"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\xff"),
    ],
)
async def test_malformed_requests_are_the_callers_fault(method: str, data: bytes) -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in channel.unary_stream(method)(data, timeout=5):
                    pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"the request of {len(data)} bytes is malformed" in (raised.value.details() or "")
        assert (await collect_fake(service, ask("hello", 2))).finish is not None


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("PrefillWorker/Prefill", b"\x0a\x06\x0a\x04\x0a\x02\xff\xfe"),  # a key that is not UTF-8
        ("DecodeWorker/Decode", b"\x0a\x06\x0a\x04\x0a\x02\xff\xfe"),
        ("KvTransfer/Link", b"\xff"),
        ("WorkerControl/GetIdentity", b"\xff"),
        ("WorkerControl/WatchLoad", b"\x80\x04\x95\x1e\x00"),  # how a pickle begins
    ],
)
async def test_malformed_requests_to_a_worker_are_the_callers_fault(
    method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    role = "prefill" if method.startswith("Prefill") else "decode"
    async with running_worker(role, num_blocks=128) as worker:
        call = worker.channel.stream_stream(f"/legato.v1.{method}")(timeout=5)
        await call.write(data)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = await call.details() or ""
        assert f"the request of {len(data)} bytes is malformed" in details
    assert caplog.records == []  # no stack trace for each


@pytest.mark.parametrize("started", [False, True])
async def test_a_malformed_message_within_a_stream_frees_what_the_call_held(
    caplog: pytest.LogCaptureFixture, started: bool
) -> None:
    async with running_worker("decode", num_blocks=128) as worker:
        call = worker.channel.stream_stream("/legato.v1.DecodeWorker/Decode")(timeout=5)
        key = worker_pb2.AttemptKey(request_id="r", attempt=1)
        reserve = worker_pb2.Reserve(
            key=key, token_ids=[1, 2, 3], num_prompt_tokens=3, sampling=sampling(5)
        )
        await call.write(worker_pb2.DecodeCommand(reserve=reserve).SerializeToString())
        assert worker_pb2.DecodeEvent.FromString(await call.read()).HasField("ticket")
        assert worker.load().reserved_blocks > 0
        if started:
            start = worker_pb2.Start(answers=[worker_pb2.StartAnswer(token_id=7)])
            await call.write(worker_pb2.DecodeCommand(start=start).SerializeToString())
        await call.write(b"\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await worker.until_idle()
    assert caplog.records == []


async def test_proxies_of_the_environment_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")
    async with LocalService(folder) as service:
        request = greedy_request([1, 2, 3], max_tokens=4, ignore_eos=True)
        answer = await collect(service.generation.Generate(request, timeout=20))
    assert len(answer.token_ids) == 4


async def test_a_ticket_that_is_never_used_ends_without_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_limit, "CALL_LIMIT_S", 0.3)
    async with running_pair() as pair:
        call = pair.d.decode.Decode()
        key = worker_pb2.AttemptKey(request_id="idle", attempt=1)
        reserve = worker_pb2.Reserve(
            key=key, token_ids=[1, 2, 3], num_prompt_tokens=3, sampling=sampling(5)
        )
        await call.write(worker_pb2.DecodeCommand(reserve=reserve))
        assert (await call.read()).WhichOneof("event") == "ticket"
        assert pair.d.load().reserved_blocks > 0
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.3 s, the limit of calls without a deadline" in (await call.details() or "")
        await pair.until_idle()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (1.0000001192092896, "1.0000001"), (-0.10000000149011612, "-0.1")],
)
def test_a_refused_number_is_shown_as_it_came(value: float, text: str) -> None:
    assert shown_float(value) == text


async def test_more_kv_memory_than_the_machine_has_is_refused_before_any_is_taken() -> None:
    config = WorkerConfig(model="fake", role="decode", kv_memory_bytes=1 << 60)
    # With a model at hand, and with one that would first have to be read.
    for server in (WorkerServer(config, fake_loaded(), sample=fake_sample), WorkerServer(config)):
        with pytest.raises(ValueError, match=r"kv_memory_bytes is 1152921504606846976, limit \d+:"):
            await server.start()


@pytest.mark.parametrize("text", ["1", "77B", "1.5K", "2ki", "3kb", "4MiB", "5 GB", "6g", "7TiB"])
def test_a_worker_reads_sizes_as_the_service_does(text: str) -> None:
    assert parse_byte_size(text) == parse_size(text)


@pytest.mark.parametrize("text", ["0.6", ".25", "1", "1.0", "2", "0", "1GiB", "0.5GiB", "", "x"])
def test_a_worker_reads_fractions_as_the_service_does(text: str) -> None:
    assert read_fraction(text, "--x") == parse_fraction(text)


def test_a_wrong_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"--kv-memory must look like 1GiB, .* got 'lots'"):
        parse_byte_size("lots", "--kv-memory")
    with pytest.raises(ValueError, match=r"--kv-memory without a unit must be .* got '1\.5'"):
        read_fraction("1.5", "--kv-memory")
    assert parse_byte_size_or_0("0", "--swap-memory") == 0
    with pytest.raises(ValueError, match=r"--swap-memory must look like .*, or 0 for none, got"):
        parse_byte_size_or_0("-1", "--swap-memory")


@pytest.mark.parametrize("parse", [parse_byte_size, parse_size])
def test_a_size_of_too_many_digits_is_refused(parse: Callable[[str], int]) -> None:
    with pytest.raises(ValueError, match="9999"):
        parse("9" * 400)
