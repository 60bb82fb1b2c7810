"""Every RPC of routers and workers refuses who lacks the right credentials; only health is open."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_worker import FakeWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_service import Service, ask, fake_router, until
from text_service import TextService
from worker_pair import Attempt, Pair, Worker, running_worker, sampling

from legato.cluster.client import AsyncClient, ClientAccess, ClientTls
from legato.cluster.config import RouterOptions
from legato.cluster.dev_certs import make_certs
from legato.cluster.metadata_channel import MetadataChannel
from legato.protos import cluster_pb2, generation_pb2, kv_transfer_pb2, worker_pb2
from legato.protos.internal_access import SECRET_KEY, WORKER_NAME, InternalAccess
from legato.protos.tls_files import CertificateSource, TlsFiles
from legato.worker.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

TOKEN, OTHER = "token-of-a-client-1", "token-of-a-client-2"
SECRET = "the secret of one service"
PUBLIC = (generation_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR)
INTERNAL = (worker_pb2.DESCRIPTOR, kv_transfer_pb2.DESCRIPTOR)
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
# What may come of a call that was let in, and had an empty message to say.
LET_IN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # of a stream that goes on
    grpc.StatusCode.NOT_FOUND,
}
Metadata = tuple[tuple[str, str], ...]


def methods(files: Sequence[Any]) -> list[str]:
    """Of all services of these files, as they are called."""
    return [
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


async def code_of(
    channel: grpc.aio.Channel, method: str, metadata: Metadata = (), data: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """How a call with one message ends; all kinds of calls are one on the wire."""
    # One batch: a write of its own that meets the end of a call would lose its status.
    call = channel.unary_stream(method)(data, timeout=2, metadata=metadata)
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details() or ""


def test_these_are_all_services_there_are() -> None:
    folder = Path(generation_pb2.__file__).parent
    written = {path.stem for path in folder.glob("*.proto") if "\nservice " in path.read_text()}
    known = {Path(file.name).stem for file in (*PUBLIC, *INTERNAL)}
    assert written == known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder / "ours")
    make_certs(folder / "theirs")
    (folder / "tokens").write_text(f"{TOKEN}\n{OTHER}\n")
    return folder


def files(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(
        str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem")
    )


def client_tls(folder: Path, name: str | None = "client") -> ClientTls:
    ca = str(folder / "ca.pem")
    return ClientTls(ca, *(str(folder / f"{name}{end}") for end in (".pem", ".key") if name))


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[tuple[TextService, grpc.aio.Channel]]:
    """A service that asks for tokens, over fake workers, and a channel that shows nothing."""
    options = RouterOptions(port=0, token_file=str(folder / "tokens"))
    (folder / "model").mkdir(exist_ok=True)
    async with (
        TextService(folder / "model", options) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        yield service, channel


async def told_services(channel: grpc.aio.Channel, metadata: Metadata) -> list[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(timeout=5, metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    call.cancel()
    return [service.name for service in answer.list_services_response.service]


# The routers.


async def test_tokens_of_clients_change_nothing_of_the_service(folder: Path) -> None:
    (folder / "roles").write_text(f"acme: {TOKEN}\nops admin: {OTHER}\n")
    options = RouterOptions(port=0, token_file=str(folder / "roles"))
    (folder / "model").mkdir(exist_ok=True)
    async with (
        TextService(folder / "model", options) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        denied = set()
        for method in methods(PUBLIC):
            code, said = await code_of(channel, method, bearer(TOKEN))
            if code is DENIED:
                denied.add(method.rpartition("/")[2])
                assert "is for tokens of the role admin; this one is of acme, role client" in said
            else:
                assert code in LET_IN, (method, code)
        # Of the Cluster service all but what only tells.
        cluster = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]
        assert denied == {method.name for method in cluster.methods} - {"GetStatus"}
        assert service.control.shutdowns == []
        for method in methods(PUBLIC):
            code, _ = await code_of(channel, method, bearer(OTHER))
            assert code in LET_IN, (method, code)
        assert len(service.control.shutdowns) == 1


async def test_every_public_rpc_needs_a_token_and_only_health_does_not(folder: Path) -> None:
    async with guarded(folder) as (service, channel):
        served = await told_services(channel, bearer(TOKEN))
        named = {method.split("/")[1] for method in methods(PUBLIC)}
        health, reflection = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
        assert set(served) == named | {health, reflection}
        asked = [*methods(PUBLIC), f"/{reflection}/ServerReflectionInfo", "/no.such.Service/Call"]
        for method in asked:
            for metadata in (
                (),
                bearer("guessed-by-somebody-1"),
                (("authorization", TOKEN),),
                (*bearer(TOKEN), *bearer("guessed-by-somebody-1")),
                (("authorization", f"Basic {TOKEN}"),),
                (("x-authorization", f"Bearer {TOKEN}"),),
            ):
                code, details = await code_of(channel, method, metadata)
                assert code is UNAUTHENTICATED, (method, metadata)
                assert "guessed" not in details
                assert TOKEN not in details
        for method in methods(PUBLIC):
            code, details = await code_of(channel, method, bearer(OTHER))
            assert code in LET_IN, (method, code, details)
        code, _ = await code_of(channel, f"/{health}/Check")
        assert code is grpc.StatusCode.OK
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        # The refused calls did nothing: the one with a token has asked for the end.
        assert len(service.control.shutdowns) == 1
        assert service.router.counters.refused == 1  # the empty request with a token


async def test_a_refused_call_is_told_before_its_message_is_read(folder: Path) -> None:
    async with guarded(folder) as (_, channel):
        huge = b"\xff" * (3 << 20)
        code, _ = await code_of(channel, "/legato.v1.Generation/Generate", data=huge)
        assert code is UNAUTHENTICATED


async def test_clients_with_a_token_are_served_and_others_told_what_to_do(folder: Path) -> None:
    async with guarded(folder) as (service, _):
        async with AsyncClient(service.address, token=TOKEN) as client:
            result = await client.generate("hello", max_tokens=4, seed=1, timeout_s=10)
            assert len(result.answers[0].token_ids) == 4
            assert (await client.status()).ready
        async with AsyncClient(service.address, token="guessed-by-somebody-1") as client:
            with pytest.raises(grpc.RpcError, match=r"UNAUTHENTICATED.*--token-file"):
                await client.generate("hello", max_tokens=4, timeout_s=10)


async def test_with_a_ca_a_router_speaks_to_its_clients_alone(folder: Path) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    workers = [FakeWorker("prefill"), FakeWorker("decode")]
    service = Service(workers[:1], workers[1:], tls=files(ours, "service"))
    router = fake_router(service.options, service.control)
    address = await router.start()
    try:
        await router.set_workers([await worker.start() for worker in workers])
        await until(lambda: router.ready)
        good = ClientAccess(tls=client_tls(ours))
        async with AsyncClient(address, access=good) as client:
            result = await client.generate(ask("hello", 4), timeout_s=10)
            assert len(result.answers[0].token_ids) == 4
        refused = (
            ClientAccess(),  # no TLS
            ClientAccess(tls=client_tls(ours, None)),  # no certificate
            ClientAccess(tls=replace(client_tls(theirs), ca_file=str(ours / "ca.pem"))),
            ClientAccess(tls=replace(client_tls(ours), ca_file=str(theirs / "ca.pem"))),
        )
        for access in refused:
            async with AsyncClient(address, access=access) as client:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await client.status()
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await router.stop()
        for worker in workers:
            await worker.die()


async def test_new_files_count_for_new_connections_and_wrong_ones_do_not(
    folder: Path, tmp_path: Path
) -> None:
    ours, theirs, used = folder / "ours", folder / "theirs", tmp_path / "used"
    shutil.copytree(ours, used)
    service = Service([], [], tls=files(used, "service"))
    router = fake_router(service.options, service.control)
    address = await router.start()

    async def is_served(where: Path) -> bool:
        access = ClientAccess(tls=client_tls(where))
        async with AsyncClient(address, access=access) as client:
            try:
                await client.status()
            except grpc.aio.AioRpcError:
                return False
            return True

    try:
        assert await is_served(ours)
        (used / "service.pem").write_text("half of a")
        assert await is_served(ours)
        for name in ("service.pem", "service.key", "ca.pem"):
            shutil.copy(theirs / name, used / name)
        assert await is_served(theirs)
        assert not await is_served(ours)
    finally:
        await router.stop()


def test_a_pair_that_does_not_fit_is_not_handed_over(folder: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(folder / "ours", used)
    source = CertificateSource(files(used, "service"))
    assert source.load() is not None
    assert source.if_new() is None
    shutil.copy(folder / "theirs" / "service.key", used / "service.key")
    assert source.if_new() is None
    shutil.copy(folder / "theirs" / "service.pem", used / "service.pem")
    assert source.if_new() is not None
    assert source.if_new() is None
    (used / "ca.pem").unlink()
    assert source.if_new() is None


# The workers.


async def codes_of(channel: grpc.aio.Channel, metadata: Metadata) -> dict[str, grpc.StatusCode]:
    return {method: (await code_of(channel, method, metadata))[0] for method in methods(INTERNAL)}


async def health_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
    return (await code_of(channel, "/grpc.health.v1.Health/Check"))[0]


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
async def test_every_internal_rpc_needs_the_secret(role: str) -> None:
    access = InternalAccess(secret=SECRET)
    async with running_worker(role, num_blocks=128, access=access) as worker:
        for metadata in (
            (),
            ((SECRET_KEY, SECRET[:-1]),),
            ((SECRET_KEY, ""),),
            ((SECRET_KEY, SECRET), (SECRET_KEY, "another")),
            bearer(SECRET),
        ):
            codes = await codes_of(worker.channel, metadata)
            assert set(codes.values()) == {UNAUTHENTICATED}, metadata
        assert worker.server.phase.name == "READY"  # nobody's Drain counted
        assert await health_of(worker.channel) is grpc.StatusCode.OK
        codes = await codes_of(worker.channel, access.metadata)
        assert set(codes.values()) <= {*LET_IN, grpc.StatusCode.UNIMPLEMENTED}, codes
        assert worker.server.phase.name == "DRAINING"


def dial(worker: Worker, tls: TlsFiles, name: str = WORKER_NAME) -> grpc.aio.Channel:
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(worker.address, tls.channel_credentials(), options)


async def test_every_internal_rpc_needs_its_own_kind_of_certificate(folder: Path) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    access = InternalAccess(files(ours, "worker"))
    kv = set(methods([kv_transfer_pb2.DESCRIPTOR]))
    async with running_worker("decode", num_blocks=128, access=access) as worker:
        for name in ("client", "worker", "service"):
            async with dial(worker, files(ours, name)) as channel:
                codes = await codes_of(channel, ())
                for method, code in codes.items():
                    let_in = name == ("worker" if method in kv else "service")
                    assert (code is not DENIED) == let_in, (name, method, code)
                    assert let_in or code is DENIED
                assert await health_of(channel) is grpc.StatusCode.OK
        strangers = (
            (files(theirs, "service"), WORKER_NAME),
            (replace(files(theirs, "service"), ca_file=str(ours / "ca.pem")), WORKER_NAME),
        )
        for tls, name in strangers:
            async with dial(worker, tls, name) as channel:
                assert set((await codes_of(channel, ())).values()) == {grpc.StatusCode.UNAVAILABLE}
        assert set((await codes_of(worker.channel, ())).values()) == {grpc.StatusCode.UNAVAILABLE}


async def test_a_server_that_is_no_worker_by_its_certificate_is_not_spoken_to(folder: Path) -> None:
    posing = InternalAccess(files(folder / "ours", "service"))
    async with (
        running_worker("decode", num_blocks=128, access=posing) as worker,
        posing.channel(worker.address, []) as channel,
    ):
        assert await health_of(channel) is grpc.StatusCode.UNAVAILABLE


async def test_both_are_asked_for_where_both_are_set(folder: Path) -> None:
    access = InternalAccess(files(folder / "ours", "worker"), SECRET)
    async with (
        running_worker("decode", num_blocks=128, access=access) as worker,
        dial(worker, files(folder / "ours", "service")) as channel,
    ):
        assert set((await codes_of(channel, ())).values()) == {UNAUTHENTICATED}


def showing(worker: Worker, access: InternalAccess) -> Worker:
    """As a router with this access sees it."""
    channel: Any = MetadataChannel(access.channel(worker.address, CHANNEL_OPTIONS), access.metadata)
    return Worker(worker.server, worker.model, worker.address, channel)


@pytest.mark.parametrize("lane", ["auto", "grpc"])
async def test_kv_goes_from_worker_to_worker_with_tls_and_secret(folder: Path, lane: str) -> None:
    access = InternalAccess(files(folder / "ours", "worker"), SECRET)
    router = InternalAccess(files(folder / "ours", "service"), SECRET)
    settings: dict[str, Any] = {"num_blocks": 128, "access": access, "kv_lane": lane}
    async with (
        running_worker("prefill", **settings) as p,
        running_worker("decode", **settings) as d,
    ):
        pair = Pair(showing(p, router), showing(d, router))
        tokens = await Attempt(pair, range(1, 20), sampling(6)).run()
        assert len(tokens) == 6
        assert d.load().kv_transfers_completed == 1
        await pair.until_idle()
        await pair.p.channel.close()
        await pair.d.channel.close()


async def test_a_worker_with_another_secret_gets_no_kv_across() -> None:
    stranger, ours = InternalAccess(secret="of another service"), InternalAccess(secret=SECRET)
    async with (
        running_worker("prefill", num_blocks=128, access=stranger) as p,
        running_worker("decode", num_blocks=128, access=ours) as d,
    ):
        pair = Pair(showing(p, stranger), showing(d, ours))
        attempt = Attempt(pair, range(1, 20), sampling(6))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        failed = (await attempt.handoff()).handoff_failed
        assert failed.refused
        assert "UNAUTHENTICATED" in failed.reason
        attempt.prefill_call.cancel()
        attempt.decode_call.cancel()
        await pair.until_idle()
        assert d.load().kv_transfers_completed == 0
        await pair.p.channel.close()
        await pair.d.channel.close()
