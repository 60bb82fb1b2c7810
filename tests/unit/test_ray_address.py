from __future__ import annotations

import socket
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from legato.cluster.errors import ServiceError
from legato.cluster.ray_address import probe_ray, resolve_ray_address, running_cluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_auto_is_the_environment_then_this_machines_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "current"
    with pytest.raises(ServiceError, match=r"no Ray cluster was found; .*ray start --head"):
        resolve_ray_address("auto", file)
    file.write_text("192.0.2.1:6379\n")
    assert resolve_ray_address("auto", file) == "192.0.2.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.2:6379")
    assert resolve_ray_address("auto", file) == "192.0.2.2:6379"
    assert resolve_ray_address("h:1", file) == "h:1"
    assert running_cluster(file) == "192.0.2.2:6379"


@pytest.mark.parametrize("address", ["here", "h:", ":6379", "h:0", "h:65536", "h:x", "h:²"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ServiceError, match="must be auto or host:port"):
        resolve_ray_address(address)


def test_ray_client_is_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="Ray Client is not supported"):
        resolve_ray_address("ray://h:10001")


def test_a_dead_port_is_noticed_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServiceError, match=f"no Ray cluster answers at {address}"):
            probe_ray(address, timeout_s=5)


def test_a_port_that_never_answers_is_given_up_within_the_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_s = time.monotonic()
        with pytest.raises(ServiceError, match="is no Ray head"):
            probe_ray(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
        assert time.monotonic() - started_s < 30


def test_a_name_that_no_server_answers_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(60))
    started_s = time.monotonic()
    with pytest.raises(ServiceError, match=r"answers at slow\.host:6379 \(no name server knew"):
        probe_ray("slow.host:6379", timeout_s=0.2)
    end.set()
    assert time.monotonic() - started_s < 30


def test_another_grpc_server_is_no_ray_head() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ServiceError, match=r"is no Ray head \(UNIMPLEMENTED\)"):
            probe_ray(f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait(5)
