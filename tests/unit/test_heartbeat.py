from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from legato.cluster.heartbeat import Heartbeat


def wait_for(value: bool, heartbeat: Heartbeat, limit_s: float) -> None:
    deadline_s = time.monotonic() + 20
    while (heartbeat.silent_for_s < limit_s) != value and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert (heartbeat.silent_for_s < limit_s) == value


def test_a_router_that_answers_is_heard() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    late_s = [0.0]
    heartbeat = Heartbeat(f"127.0.0.1:{port}", now=lambda: time.monotonic() + late_s[0])
    try:
        late_s[0] = 100.0
        assert heartbeat.silent_for_s > 99
        wait_for(True, heartbeat, 10)  # the next answer makes it fresh again
    finally:
        heartbeat.stop()
        server.stop(0)


def test_a_router_that_takes_connections_and_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # as a stopped process looks
        heartbeat = Heartbeat(f"127.0.0.1:{listener.getsockname()[1]}")
        try:
            wait_for(False, heartbeat, 3)
        finally:
            heartbeat.stop()
