"""measure_links: how fast bytes go from this node of a Ray cluster to each of the others."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.actors.service import failure_in_words

NUM_BYTES = 128 << 20
CALL_TIMEOUT_S = 30.0
SOCKET_TIMEOUT_S = 20.0
_PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class LinkSpeed:
    """To one other node; `problem` says why there is none."""

    host: str
    bytes_per_s: float = 0.0
    round_trip_s: float = 0.0
    problem: str = ""


class _Sink:
    """On the other node: takes bytes and says when all are there."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._server.settimeout(SOCKET_TIMEOUT_S)

    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.getsockname()[1]
        return port

    def take(self, num_bytes: int) -> None:
        """One connection: answers one byte with one, then all others with one."""
        connection, _ = self._server.accept()
        with connection:
            connection.settimeout(SOCKET_TIMEOUT_S)
            connection.sendall(connection.recv(1))
            left, buffer = num_bytes, bytearray(1 << 20)
            while left > 0:
                got = connection.recv_into(buffer)
                if not got:
                    return
                left -= got
            connection.sendall(b".")


def measure_links(address: str) -> list[LinkSpeed]:
    """Joins the cluster for some seconds. Legato must be installed on its nodes.

    Raises:
        ServiceError: it cannot be joined.
    """
    with failure_in_words(f"joining Ray at {address} failed"):
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    try:
        me = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray's
        return [_measure(node) for node in nodes if node["NodeID"] != me]
    finally:
        ray.shutdown()


def _measure(node: dict[str, Any]) -> LinkSpeed:
    host = str(node["NodeManagerAddress"])
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor: Any = ray.remote(_Sink).options(num_cpus=0, scheduling_strategy=where)
    sink = actor.remote(host)
    try:
        port = ray.get(sink.port.remote(), timeout=CALL_TIMEOUT_S)
        taking = sink.take.remote(NUM_BYTES)
        with socket.create_connection((host, port), timeout=SOCKET_TIMEOUT_S) as connection:
            began_s = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            round_trip_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            for _ in range(NUM_BYTES // len(_PIECE)):
                connection.sendall(_PIECE)
            connection.recv(1)
            seconds = time.perf_counter() - began_s
        ray.get(taking, timeout=CALL_TIMEOUT_S)
    except (OSError, ray.exceptions.RayError) as error:
        return LinkSpeed(host, problem=" ".join(str(error).split())[:200])
    finally:
        ray.kill(sink, no_restart=True)
    return LinkSpeed(host, NUM_BYTES / seconds, round_trip_s)
