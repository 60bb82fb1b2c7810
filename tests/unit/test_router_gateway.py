"""The public server: health, reflection, status, scaling, limits, and how errors look."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_worker import FakeWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_service import FakeControl, Service, ask, collect, expected, fake_router, until

from legato.cluster.actors.plans import RouterPlan
from legato.cluster.client import Client
from legato.cluster.config import RouterOptions
from legato.cluster.gateway import CLUSTER, GENERATION, MAX_REQUEST_BYTES
from legato.cluster.request import parse_request
from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError
from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2
from legato.protos.status_details import Violation, read_details

if TYPE_CHECKING:
    from google.protobuf.message import Message

SERVING = health_pb2.HealthCheckResponse.SERVING
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
RANGE = "[0, 1024]"
ROLE_NUMBERS = "one of 1 (prefill), 2 (decode), 3 (colocated)"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def pair(**decode: Any) -> tuple[list[FakeWorker], list[FakeWorker]]:  # noqa: ANN401
    return [FakeWorker("prefill")], [FakeWorker("decode", **decode)]


async def health_of(service: Service, name: str) -> int:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return int(response.status)


async def wait_health(service: Service, name: str, status: int) -> None:
    deadline = time.monotonic() + 5
    while await health_of(service, name) != status:
        assert time.monotonic() < deadline, f"health of {name!r} did not become {status}"


async def test_health_follows_the_workers() -> None:
    async with Service([FakeWorker("prefill")], []) as service:
        assert await health_of(service, CLUSTER) == SERVING
        assert await health_of(service, GENERATION) == NOT_SERVING
        assert await health_of(service, "") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 5))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no ready worker in the" in (raised.value.details() or "")
        decode = FakeWorker("decode")
        service.decodes.append(decode)
        await service.router.set_workers([*service.endpoints, await decode.start()])
        await service.client.wait_ready(5)
        await wait_health(service, GENERATION, SERVING)
        await decode.die()
        await wait_health(service, "", NOT_SERVING)
        await wait_health(service, GENERATION, NOT_SERVING)
        assert await health_of(service, CLUSTER) == SERVING


async def test_reflection_lists_the_services() -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        response = await stub.ServerReflectionInfo(iter([request])).read()
        names = {item.name for item in response.list_services_response.service}
        assert {GENERATION, CLUSTER, "grpc.health.v1.Health"} <= names


UNKNOWN = b"\xf8\x06\x01"  # field 111, varint 1
# What some methods must have as well, or another field is named before.
NEEDED = {
    "ScalePool": cluster_pb2.ScalePoolRequest(
        targets=[cluster_pb2.PoolTarget(role=PREFILL, target=1)]
    ),
    "Generate": generation_pb2.GenerateRequest(text="x"),
}


async def test_no_method_overlooks_a_field_of_newer_clients() -> None:
    services = [
        *generation_pb2.DESCRIPTOR.services_by_name.values(),
        *cluster_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    methods = {method.name: method for service in services for method in service.methods}
    assert methods.keys() > {"Generate", "GetModel", "GetStatus", "ScalePool", "Shutdown"}
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        service.router.reader.parse = parse_request
        for name, method in methods.items():
            needed = NEEDED[name].SerializeToString() if name in NEEDED else b""
            call = channel.unary_stream(f"/{method.containing_service.full_name}/{name}")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(needed + UNKNOWN, timeout=5).read()
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED, name
            told = raised.value.details() or ""
            assert told.startswith(f"{method.input_type.name} has field number 111"), name
        assert service.control.shutdowns == service.control.drained == []
        within = cluster_pb2.ScalePoolRequest()
        within.targets.add(role=PREFILL, target=1).MergeFromString(UNKNOWN)
        with pytest.raises(grpc.aio.AioRpcError, match=r"targets\[0\] has field number 111"):
            await cluster_pb2_grpc.ClusterStub(channel).ScalePool(within, timeout=5)


async def test_the_model_and_its_limits() -> None:
    async with Service(*pair(total_blocks=30)) as service:
        model = await service.client.model()
        assert model.name == "fake-model"
        assert model.context_length == 512
        assert model.vocab_size == 320
        assert model.fingerprint == "f1"
        assert list(model.eos_token_ids) == [257]
        assert model.decode_kv_tokens == 120
        assert model.prefill_kv_tokens == 256
        assert model.block_size == 4


async def test_status_adds_loads_and_counts() -> None:
    async with Service(*pair()) as service:
        worker = service.decodes[0]
        service.control.told = [
            cluster_pb2.PoolStatus(
                role=common_pb2.WORKER_ROLE_DECODE,
                target=1,
                ready=1,
                workers=[cluster_pb2.WorkerStatus(worker_id=worker.worker_id)],
            )
        ]
        await collect(service, ask("hello", 5))
        status = await service.client.status()
        assert status.ready
        assert status.router.completed == 1
        assert status.owner_pid == 7
        assert status.pools[0].workers[0].load.total_blocks == worker.total_blocks
        assert not service.control.told[0].workers[0].HasField("load")


async def test_status_answers_though_the_controller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("legato.cluster.cluster_service.CONTROL_TIMEOUT_S", 0.1)
    async with Service(*pair()) as service:
        service.control.pools_delay_s = 30
        status = await service.client.status()
        assert {pool.role for pool in status.pools} == {1, 2}
        assert all("does not answer" in pool.message for pool in status.pools)
        assert status.pools[1].workers[0].worker_id == service.decodes[0].worker_id


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ([], "targets has 0 entries, limit [1, 3]"),
        ([(1, -1)], "targets[0].target is -1"),
        ([(1, 1025)], "limit [0, 1024]"),
        ([(0, 1)], "targets[0].role is 0"),
        ([(7, 1)], "targets[0].role is 7"),
        ([(1, None)], "targets[0].target is not set"),
        ([(2, 1), (2, 2)], "targets[1].role is 2 again"),
    ],
)
async def test_scaling_checks_its_numbers(
    targets: list[tuple[Any, int | None]], sentence: str
) -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        request = cluster_pb2.ScalePoolRequest(
            targets=[cluster_pb2.PoolTarget(role=role, target=size) for role, size in targets]
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster_pb2_grpc.ClusterStub(channel).ScalePool(request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in (raised.value.details() or "")
        assert service.control.targets == {"prefill": 1, "decode": 1}


async def test_scaling_and_shutdown_reach_the_controller() -> None:
    async with Service(*pair()) as service:
        assert await service.client.scale({"decode": 1024}) == {"prefill": 1, "decode": 1024}
        assert await service.client.scale({"prefill": 0}) == {"prefill": 0, "decode": 1024}
        await service.client.shutdown()
        await service.client.shutdown(0.0)
        for bad in (-1.0, 601.0, float("nan")):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await service.client.shutdown(bad)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.control.shutdowns == [10.0, 0.0]


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (UnknownWorkerError("nobody is here"), grpc.StatusCode.NOT_FOUND),
        (RoleChangeRefusedError("it is the last"), grpc.StatusCode.FAILED_PRECONDITION),
        (ValueError("begins 2 ids"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_change_of_role_reaches_the_controller(
    refusal: ValueError, code: grpc.StatusCode
) -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.ChangeRoleRequest(worker_id="prefill-1", role=DECODE)
        answer = await stub.ChangeRole(request)
        assert answer.worker_id == "prefill-1-in-full"
        assert [(t.role, t.target) for t in answer.targets] == [(PREFILL, 1), (DECODE, 1)]
        assert service.control.role_changes == [("prefill-1", "decode")]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ChangeRole(cluster_pb2.ChangeRoleRequest(worker_id="prefill-1"))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "role is 0, limit one of 1 (prefill), 2 (decode), 3 (coloc" in (
            raised.value.details() or ""
        )
        service.control.refusal = refusal
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ChangeRole(request)
        assert (raised.value.code(), raised.value.details()) == (code, str(refusal))


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (UnknownWorkerError("nobody is here"), grpc.StatusCode.NOT_FOUND),
        (RoleChangeRefusedError("it is starting"), grpc.StatusCode.FAILED_PRECONDITION),
        (ValueError("begins 2 ids"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_drain_reaches_the_controller(refusal: ValueError, code: grpc.StatusCode) -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.DrainWorkerRequest(worker_id="decode-1")
        assert (await stub.DrainWorker(request)).worker_id == "decode-1-in-full"
        assert service.control.drained == ["decode-1"]
        service.control.refusal = refusal
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.DrainWorker(request)
        assert (raised.value.code(), raised.value.details()) == (code, str(refusal))


async def test_a_nodes_drain_reaches_the_controller() -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.DrainNodeRequest(node="10.0.0.7")
        assert (await stub.DrainNode(request)).worker_ids == ["decode-1-on-10.0.0.7"]
        service.control.refusal = RoleChangeRefusedError("the service was started there")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.DrainNode(request)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        service.control.refusal = UnknownWorkerError("no node has that name; there are 10.0.0.7")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.DrainNode(request)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        details = read_details(tuple(raised.value.trailing_metadata() or ()))
        assert details.reason == "UNKNOWN_NODE"
        assert "addresses that the message names" in details.remedy


def pool_target(**fields: int) -> cluster_pb2.ScalePoolRequest:
    return cluster_pb2.ScalePoolRequest(targets=[cluster_pb2.PoolTarget(**fields)])


@pytest.mark.parametrize(
    ("method", "request_", "violation"),
    [
        ("ScalePool", cluster_pb2.ScalePoolRequest(), ("targets", "0 entries", "[1, 3]")),
        ("ScalePool", pool_target(role=DECODE, target=-1), ("targets[0].target", "-1", RANGE)),
        ("ScalePool", pool_target(role=DECODE, target=1025), ("targets[0].target", "1025", RANGE)),
        ("ScalePool", pool_target(role=DECODE), ("targets[0].target", "not set", RANGE)),
        ("ScalePool", pool_target(target=1), ("targets[0].role", "0", ROLE_NUMBERS)),
        ("ChangeRole", cluster_pb2.ChangeRoleRequest(role=9), ("role", "9", ROLE_NUMBERS)),
        ("Shutdown", cluster_pb2.ShutdownRequest(drain_timeout_s=-1),
         ("drain_timeout_s", "-1", "[0, 600]")),
        ("DrainNode", cluster_pb2.DrainNodeRequest(node="x" * 300), ("node", "300 chars", "256")),
    ],
)  # fmt: skip
async def test_a_wrong_order_is_told_by_field_value_and_limit(
    method: str, request_: Message, violation: tuple[str, str, str]
) -> None:
    async with Service(*pair()) as service, grpc.aio.insecure_channel(service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(cluster_pb2_grpc.ClusterStub(channel), method)(request_)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = read_details(tuple(raised.value.trailing_metadata() or ()))
    assert details.violation == Violation(*violation)


async def test_the_blocking_client_does_the_same() -> None:
    async with Service(*pair()) as service:

        def use() -> list[int]:
            with Client(service.address) as client:
                client.wait_ready(5)
                assert client.status().ready
                assert client.scale({"decode": 2})["decode"] == 2
                assert client.model().name == "fake-model"
                return client.generate(ask("hello", 5)).token_ids

        assert await asyncio.to_thread(use) == expected("hello", 5)


async def test_a_client_waits_for_a_service_no_longer_than_told() -> None:
    async with Service([FakeWorker("prefill")], []) as service:
        with pytest.raises(TimeoutError, match=r"not ready after 0\.1 s"):
            await service.client.wait_ready(0.1)


async def test_a_full_queue_says_when_to_come_back() -> None:
    prefills, decodes = pair(total_blocks=8, step_s=0.02)
    async with Service(prefills, decodes, max_queued_requests=1) as service:
        prompt = "a" * 20  # 6 of the 8 blocks, to begin with
        running = [asyncio.create_task(collect(service, ask(prompt, 12))) for _ in range(2)]
        await until(lambda: service.router.admission.num_queued == 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask(prompt, 12))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hint = dict(raised.value.trailing_metadata() or ())["retry-after-ms"]
        assert int(hint) >= 100
        assert "try again in" in (raised.value.details() or "")
        for result in await asyncio.gather(*running):
            assert result.token_ids == expected(prompt, 12)
        assert service.router.counters.refused == 1


async def test_an_unforeseen_error_shows_a_reference_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Service(*pair()) as service:

        def broken(*_: object) -> Any:  # noqa: ANN401
            raise KeyError("a secret of the prompt")

        service.router.reader.parse = broken
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 5))
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        details = raised.value.details() or ""
        assert "secret" not in details
        assert details.split()[-1] in caplog.text


def request_of_size(num_bytes: int) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(text="x" * (num_bytes - 20))
    request.text += "x" * (num_bytes - request.ByteSize())
    assert request.ByteSize() == num_bytes
    return request


async def test_requests_up_to_exactly_the_message_limit_pass() -> None:
    assert MAX_REQUEST_BYTES == 4_194_304
    prefill = FakeWorker("prefill", total_blocks=10**7)
    async with Service([prefill], [FakeWorker("decode", total_blocks=10**7)]) as service:
        seen: list[int] = []

        def short(request: generation_pb2.GenerateRequest, *rest: Any) -> Any:  # noqa: ANN401
            seen.append(request.ByteSize())
            return parse(ask("short", 1), *rest)

        parse, service.router.reader.parse = service.router.reader.parse, short
        async for _ in service.client.generate(request_of_size(MAX_REQUEST_BYTES), timeout_s=10):
            pass
        assert seen == [MAX_REQUEST_BYTES]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in service.client.generate(
                request_of_size(MAX_REQUEST_BYTES + 1), timeout_s=10
            ):
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert seen == [MAX_REQUEST_BYTES]


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router = fake_router(RouterOptions(port=port), FakeControl())
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await router.start()
        await router.stop()


async def test_two_services_do_not_share_a_port() -> None:
    async with Service(*pair()) as service:
        port = int(service.address.rsplit(":", 1)[1])
        router = fake_router(RouterOptions(port=port), FakeControl())
        with pytest.raises(OSError, match="the port is taken"):
            await router.start()
        await router.stop()


async def test_slow_parsing_holds_up_nobody_else() -> None:
    async with Service(*pair()) as service:
        parse = service.router.reader.parse

        def slow_for_long_texts(request: Any, *rest: Any) -> Any:  # noqa: ANN401
            if len(request.text) > 50:
                time.sleep(0.8)
            return parse(request, *rest)

        service.router.reader.parse = slow_for_long_texts
        long = asyncio.create_task(collect(service, ask("x" * 60, 2)))
        await until(lambda: service.router.num_in_flight == 1)
        assert (await collect(service, ask("short", 3))).token_ids == expected("short", 3)
        assert await health_of(service, "") == SERVING
        assert not long.done()
        await long


async def test_draining_lets_running_requests_end_and_takes_no_new_ones() -> None:
    prefills, decodes = pair(step_s=0.005)
    async with Service(prefills, decodes, worker_silence_s=60) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 40)))
        await until(lambda: decodes[0].num_tokens_sent > 2)
        decodes[0].hang()  # so that the answer is surely not over before the drain begins
        draining = asyncio.create_task(service.router.drain(10))
        await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("late", 3))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (raised.value.details() or "")
        await wait_health(service, "", NOT_SERVING)
        assert not reading.done()
        assert not draining.done()
        decodes[0].resume()
        assert (await reading).token_ids == expected("hello", 40)
        await asyncio.wait_for(draining, 5)


async def test_a_drain_is_bounded() -> None:
    prefills, decodes = pair(step_s=0.05)
    async with Service(prefills, decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 150)))
        await until(lambda: decodes[0].num_tokens_sent > 2)
        await asyncio.wait_for(service.router.drain(0.1), 3)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (raised.value.details() or "")
        await service.settle()


async def test_of_two_drains_the_newest_counts_and_both_tell_the_same() -> None:
    prefills, decodes = pair(step_s=0.05)
    async with Service(prefills, decodes, worker_silence_s=60) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 150)))
        await until(lambda: decodes[0].num_tokens_sent > 2)
        first = asyncio.create_task(service.router.drain(0.3))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(service.router.drain(60.0))
        await asyncio.sleep(0.6)
        assert not first.done()
        left_s = service.router.drain_left_s
        assert left_s is not None
        assert 50.0 < left_s < 60.0
        assert await asyncio.wait_for(service.router.drain(0.0), 3) == 1
        assert (await first, await second) == (1, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await reading


async def test_who_waits_for_the_end_is_told_what_it_cost() -> None:
    prefills, decodes = pair()
    async with (
        Service(prefills, decodes) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        stub = cluster_pb2_grpc.ClusterStub(channel)
        asked = cluster_pb2.ShutdownRequest(drain_timeout_s=3.0, wait=True)
        waiting = asyncio.ensure_future(stub.Shutdown(asked, timeout=10))
        await until(lambda: service.control.shutdowns == [3.0])
        assert not waiting.done()
        service.router.tell_end(5)
        assert (await waiting).num_cut == 5


async def test_a_router_that_was_started_again_tells_the_services_age() -> None:
    plan = RouterPlan(RouterOptions(), 1, "m", "m", "0", 1, "here", time.monotonic() - 500.0)
    router = fake_router(RouterOptions(port=0), FakeControl(), plan.started_at)
    address = await router.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)
            status = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=5)
        assert 500.0 <= status.uptime_s < 530.0
    finally:
        await router.stop()
