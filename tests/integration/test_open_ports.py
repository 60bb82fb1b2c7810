"""What listens, on which addresses; and what strangers can do to each port: nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import pickle
import random
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from message_fields import inputs
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import (
    cluster_pb2,
    generation_pb2,
    kv_transfer_pb2,
    worker_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

TOKEN = "token-of-a-client-1"
PROMPT = ("generate", "--raw", "the canary", "--temperature", "0", "--max-tokens", "8", "--json")
PUBLIC = (generation_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR)
INTERNAL = (worker_pb2.DESCRIPTOR, kv_transfer_pb2.DESCRIPTOR)
HUGE = 2**31 - 1


class Marker:
    """Whoever unpickles it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ports")
    make_llama_folder(folder / "tiny")
    (folder / "tokens").write_text(TOKEN)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    words = ("--model", str(folder / "tiny"), "--kv-memory", "16MiB", "--threads", "1")
    more = ("--api-token-file", str(folder / "tokens"), "--request-log", str(folder / "requests"))
    with Served(folder / "log", *words, *more) as service:
        yield service


def processes(served: Served) -> list[psutil.Process]:
    served.note_descendants()
    owner = psutil.Process(served.process.pid)
    return [
        p for p in {owner, *served.descendants, *owner.children(recursive=True)} if p.is_running()
    ]


def listening(served: Served) -> dict[tuple[str, int], str]:
    """Address and port of every socket that waits for somebody, and whose it is."""
    found = {}
    for process in processes(served):
        with suppress(psutil.NoSuchProcess):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM):
                    found[plain(each.laddr.ip), each.laddr.port] = process.name()
    return found


def plain(address: str) -> str:
    """An IPv4 one that is written as an IPv6 one, as the former."""
    read = ipaddress.ip_address(address)
    mapped = read.ipv4_mapped if isinstance(read, ipaddress.IPv6Address) else None
    return str(mapped or read)


def status(served: Served, folder: Path) -> dict[str, Any]:
    words = (
        "status",
        "--json",
        "--address",
        served.address,
        "--token-file",
        str(folder / "tokens"),
    )
    answer: dict[str, Any] = json.loads(legato(*words).stdout)
    return answer


def canary(served: Served, folder: Path) -> list[int]:
    more = ("--address", served.address, "--token-file", str(folder / "tokens"))
    result = legato(*PROMPT, *more)
    assert result.returncode == 0, result.stderr
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


def worker_addresses(served: Served, folder: Path) -> dict[str, str]:
    pools = status(served, folder)["pools"]
    return {w["address"]: w["role"] for pool in pools for w in pool["workers"]}


def test_nothing_listens_to_other_machines(served: Served, folder: Path) -> None:
    found = listening(served)
    names = set(found.values())
    assert len(found) > 4, found  # router, two workers, and Ray's
    assert any("raylet" in name for name in names), names
    others = {a: name for a, name in found.items() if not ipaddress.ip_address(a[0]).is_loopback}
    assert others == {}
    ports = {port for _, port in found}
    ours = {served.address, *worker_addresses(served, folder)}
    assert {int(address.rpartition(":")[2]) for address in ours} <= ports


def say(address: tuple[str, int], data: bytes) -> None:
    """Somebody connects, says it, and hears what comes for a moment."""
    with suppress(OSError), socket.create_connection(address, timeout=2) as connection:
        connection.sendall(data)
        connection.settimeout(0.2)
        with suppress(OSError):
            connection.recv(4096)


def garbage(marker: Path) -> list[bytes]:
    draw = random.Random(3)
    bomb = pickle.dumps(Marker(marker))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return [
        b"",
        draw.randbytes(1),
        draw.randbytes(10_000),
        b"\x00" * 5_000,
        bomb,
        len(bomb).to_bytes(4, "big") + bomb,
        len(bomb).to_bytes(8, "little") + bomb,
        b"\x80\x02" + bomb,
        preface + draw.randbytes(500),
        preface + b"\xff\xff\xff" + b"\x00" * 6,  # a frame of 16 MiB that never comes
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 5_000,  # a flood of settings
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bomb,
        b"\x16\x03\x01" + draw.randbytes(300),  # as TLS begins
    ]


def absurd_frames() -> list[kv_transfer_pb2.KvFrame]:
    rows = kv_transfer_pb2.KvRows(
        epoch=2**64 - 1, attempt=HUGE, num_layers=HUGE, token_start=HUGE, num_tokens=HUGE,
        kv_head_start=HUGE, num_kv_heads=HUGE, data=b"x" * 1000,
    )  # fmt: skip
    memory = kv_transfer_pb2.KvMemory(
        pid=1, fd=0, token=b"x", slots_offset=2**62, slot_bytes=2**62, num_slots=HUGE
    )
    ticket = worker_pb2.KvTicket(key=worker_pb2.AttemptKey(request_id="another's"), epoch=1)
    return [
        kv_transfer_pb2.KvFrame(rows=rows),
        kv_transfer_pb2.KvFrame(rows=kv_transfer_pb2.KvRows(data=b"x" * (20 << 20))),
        kv_transfer_pb2.KvFrame(hello=kv_transfer_pb2.KvHello(memory=memory)),
        kv_transfer_pb2.KvFrame(open=kv_transfer_pb2.KvOpen(ticket=ticket, num_tokens=HUGE)),
        kv_transfer_pb2.KvFrame(close=kv_transfer_pb2.KvClose(commit=True, num_rows=2**63 - 1)),
    ]


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    stream = channel.unary_stream(f"/legato.v1.{method}")(data, timeout=5)
    with suppress(grpc.aio.AioRpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    return await stream.code()


async def strangers(address: str, bomb: bytes) -> dict[str, grpc.StatusCode]:
    """How every method that we have ends at a port, for who has no credentials."""
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        codes = {}
        for method in inputs((*PUBLIC, *INTERNAL)):
            for data in (b"", bomb):
                codes[f"{method} of {len(data)}"] = await call(channel, method, data)
        for number, frame in enumerate(absurd_frames()):
            data = frame.SerializeToString()
            codes[f"frame {number}"] = await call(channel, "KvTransfer/Link", data)
        return codes


def test_strangers_can_do_nothing_at_any_port(served: Served, folder: Path) -> None:
    before, running = canary(served, folder), {p.pid for p in processes(served)}
    marker = folder / "marker"
    bomb = pickle.dumps(Marker(marker))
    workers = worker_addresses(served, folder)
    assert set(workers.values()) == {"WORKER_ROLE_PREFILL", "WORKER_ROLE_DECODE"}
    ports = sorted(listening(served))
    for address in ports:
        for data in garbage(marker):
            say(address, data)
    addresses = [f"{host}:{port}" for host, port in ports]
    ours = {served.address, *workers}
    assert ours <= set(addresses)
    for address in addresses:
        codes = asyncio.run(strangers(address, bomb))
        if address in ours:
            assert set(codes.values()) == {grpc.StatusCode.UNAUTHENTICATED}, codes
        assert grpc.StatusCode.OK not in codes.values()
    assert not marker.exists()
    assert canary(served, folder) == before
    assert running <= {p.pid for p in processes(served)}
    pools = status(served, folder)["pools"]
    assert set(worker_addresses(served, folder)) == set(workers)  # none had to be replaced
    for worker in (worker for pool in pools for worker in pool["workers"]):
        assert worker["kv_blocks"]["held"] == 0
        assert worker["load"]["running"] == worker["load"]["transferring"] == 0


def test_a_marker_would_be_left(tmp_path: Path) -> None:
    os.close(pickle.loads(pickle.dumps(Marker(tmp_path / "marker"))))  # our own
    assert (tmp_path / "marker").exists()


def test_the_token_stands_nowhere(served: Served, folder: Path) -> None:
    canary(served, folder)
    refused = legato("status", "--address", served.address, env={"LEGATO_TOKEN": TOKEN + "x"})
    assert refused.returncode == 1
    assert "UNAUTHENTICATED" in refused.stderr
    assert "--token-file" in refused.stderr
    shown = [refused.stderr, served.output, json.dumps(status(served, folder))]
    for process in processes(served):
        with suppress(psutil.NoSuchProcess):
            shown += [*process.cmdline(), *process.environ().values()]
    logs = [path for path in served.temp_folder().rglob("*") if path.is_file()]
    assert any(path.suffix == ".err" for path in logs)
    for path in [*logs, folder / "requests"]:
        shown.append(path.read_text(errors="replace"))
    assert [text[:200] for text in shown if TOKEN in text] == []
