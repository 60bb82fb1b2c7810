"""IdleFlood, Canary: connections that ask nothing, and clients that ask while those are open."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

import grpc
import httpx2
from http_service import TEXT, asked
from router_service import ask

from legato.protos import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from limited_service import Ports

# HTTP/2's preface and an empty SETTINGS: gRPC takes it as a client that has no calls yet.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
CONNECT_TIMEOUT_S = 2.0
CANARY_TIMEOUT_S = 5.0
PER_ADDRESS = (
    5000  # of some 28,000 ports for each pair of addresses; the rest makes one quick to find
)
IP_BIND_ADDRESS_NO_PORT = 24  # Linux: the port is chosen on connecting, among those free to there


class Idle(Enum):
    """What is sent on a connection before nothing more is."""

    GRPC_SILENT = "gRPC, silent"
    GRPC_GREETED = "gRPC, HTTP/2 without a call"
    HTTP_SILENT = "HTTP, silent"
    HTTP_SERVED = "HTTP, kept alive"


_SAID = {
    Idle.GRPC_GREETED: HTTP2_HELLO,
    Idle.HTTP_SERVED: b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
}


class IdleFlood:
    """Keeps what it has opened until `close`, whether the other side does or not."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._sockets: list[socket.socket] = []

    async def open(self, kinds: Sequence[Idle], count: int) -> int:
        """Opens `count`, of all kinds in turn, from one loopback address after the other; returns
        how many connected.
        """
        loop, before = asyncio.get_running_loop(), len(self._sockets)
        for number in range(count):
            kind = kinds[number % len(kinds)]
            port = self._ports.grpc if kind.value.startswith("gRPC") else self._ports.http
            host, _, number_of_port = port.rpartition(":")
            made = socket.socket()
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            try:
                made.bind((f"127.0.0.{2 + len(self._sockets) // PER_ADDRESS}", 0))
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(made, (host, int(number_of_port)))
                    with suppress(ConnectionError):  # the service may have said no already
                        await loop.sock_sendall(made, _SAID.get(kind, b""))
            except (OSError, TimeoutError):
                made.close()
                break
            self._sockets.append(made)
        return len(self._sockets) - before

    def num_held(self) -> int:
        """How many the service has not ended."""
        held = 0
        for opened in self._sockets:
            try:
                while opened.recv(4096):
                    pass
            except BlockingIOError:
                held += 1
            except OSError:
                pass
        return held

    def close(self) -> None:
        """Ends them all."""
        for opened in self._sockets:
            opened.close()
        self._sockets.clear()


class Canary:
    """One request at a time: on connections that it has, and over HTTP on new ones too.

    Use as an async context manager.
    """

    def __init__(self, ports: Ports) -> None:
        self._url = f"http://{ports.http}"
        self._address = ports.grpc
        self._channel = grpc.aio.insecure_channel(ports.grpc)
        self._http = self._new_http()

    def _new_http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self._url,
            trust_env=False,
            verify=False,  # no TLS here, and certificates take a while to read
            timeout=CANARY_TIMEOUT_S,
        )

    async def __aenter__(self) -> Canary:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._http.aclose()

    async def waits_s(self, count: int) -> dict[str, list[float]]:
        """How long each of `count` requests took on each way; raises where one is not answered."""
        ways = {"grpc": self._ask_grpc, "http": self._ask_http, "http_new": self._ask_new_http}
        waits: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(count):
            for way, call in ways.items():
                begun_s = time.monotonic()
                await call()
                waits[way].append(time.monotonic() - begun_s)
        return waits

    async def newcomer(self) -> grpc.StatusCode:
        """What a new gRPC connection is told."""
        options = [("grpc.use_local_subchannel_pool", 1)]  # else it is the connection there is
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            try:
                await self._ask_grpc(channel)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    async def _ask_grpc(self, channel: grpc.aio.Channel | None = None) -> None:
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(
            channel or self._channel
        )
        answers = [a async for a in stub.Generate(ask("canary", 2), timeout=CANARY_TIMEOUT_S)]
        assert answers[-1].HasField("finish")

    async def _ask_http(self) -> None:
        response = await self._http.post(TEXT, json=asked(2, prompt="canary"))
        assert response.status_code == 200, response.text

    async def _ask_new_http(self) -> None:
        async with self._new_http() as http:
            response = await http.post(TEXT, json=asked(2, prompt="canary"))
            assert response.status_code == 200, response.text


def percentiles_ms(waits_s: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """p50 and p99 of each way."""
    shown = {}
    for way, waits in waits_s.items():
        cuts = statistics.quantiles(waits, n=100, method="inclusive")
        shown[way] = {"p50_ms": round(1000 * cuts[49], 1), "p99_ms": round(1000 * cuts[98], 1)}
    return shown
