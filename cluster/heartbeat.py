"""Heartbeat: whether the router still answers, asked from a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato.cluster.client_access import NOTHING_SHOWN, ClientAccess

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S = 1.0
ANSWER_TIMEOUT_S = 2.0
# Long against the pauses of an overloaded machine, short against a person's patience.
SILENCE_S = 10.0


class Heartbeat:
    """Asks the router's health service once a second.

    A process that has ended is told by Ray; one that is stopped or hangs is told by nobody else,
    and its clients would wait until their deadlines.
    """

    def __init__(
        self,
        address: str,
        access: ClientAccess = NOTHING_SHOWN,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._access = access
        self._now = now
        self._heard_at = now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def silent_for_s(self) -> float:
        """Seconds since the last answer, or since the start."""
        return self._now() - self._heard_at

    def forgive(self) -> None:
        """Counts its silence from now on: it has just begun to serve, or been ended."""
        self._heard_at = self._now()

    def stop(self) -> None:
        """Ends the asking."""
        self._ended.set()
        self._thread.join(ANSWER_TIMEOUT_S + 1)

    def _run(self) -> None:
        # Our own ping, not the client's: the proxy of the environment is for other hosts.
        options = [("grpc.enable_http_proxy", 0)]
        with self._access.channel(self._address, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._ended.wait(PERIOD_S):
                try:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_TIMEOUT_S)
                except grpc.RpcError:
                    continue  # counted by silent_for_s
                self._heard_at = self._now()


def dial_address(address: str) -> str:
    """Where a client on this machine reaches a server that may listen on every interface."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"
