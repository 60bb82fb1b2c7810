"""Where HTTP listens: beside gRPC, at ports that no two services share by default."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from serve_configs import note_configs
from typer.testing import CliRunner

from legato.cluster.actors.plans import RouterPlan
from legato.cluster.cli.app import build_app
from legato.cluster.config import RouterOptions, ServiceConfig
from legato.cluster.errors import ServiceError
from legato.cluster.router_ports import check_port, http_ports

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ((), 51051),
        (("--port", "6000"), 7000),
        (("--port", "0"), 0),
        (("--port", "6000", "--http-port", "8000"), 8000),
        (("--http-port", "0"), 0),
        (("--no-http",), None),
        (("--no-http", "--http-port", "8000"), None),
    ],
)
def test_the_options(
    monkeypatch: pytest.MonkeyPatch, words: Sequence[str], port: int | None
) -> None:
    configs = note_configs(monkeypatch)
    result = CliRunner().invoke(build_app(), ["serve", "--model", "m", *words])
    assert result.exit_code == 0, result.output
    [config] = configs
    assert config.router.http_port == port


def config(http_port: int | None, port: int = 50051, num_routers: int = 1) -> ServiceConfig:
    router = RouterOptions(port=port, http_port=http_port)
    return ServiceConfig(model="m", router=router, num_routers=num_routers)


def test_those_of_several_routers_follow_each_other() -> None:
    assert http_ports(config(None, num_routers=3)) == []
    assert http_ports(config(0, num_routers=3)) == [0]
    assert http_ports(config(8000, num_routers=3)) == [8000, 8001, 8002]
    plan = RouterPlan(config(8000).router, 3, "m", "m", "0", 1, "here")
    assert [plan.http_port_of(number) for number in range(3)] == [8000, 8001, 8002]
    plan = RouterPlan(config(0).router, 3, "m", "m", "0", 1, "here")
    assert [plan.http_port_of(number) for number in range(3)] == [0, 0, 0]
    plan = RouterPlan(config(None).router, 3, "m", "m", "0", 1, "here")
    assert plan.http_port_of(1) is None


def test_ports_that_cannot_be_are_refused_in_a_sentence() -> None:
    with pytest.raises(ServiceError, match=r"need the ports 65534 to 65536; .* --http-port"):
        http_ports(config(65534, num_routers=3))
    with pytest.raises(ServiceError, match=r"port 50052 is asked for twice, by --port and by"):
        http_ports(config(50052, num_routers=2))
    assert http_ports(config(50053, num_routers=2)) == [50053, 50054]


def test_a_taken_one_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f"port {port} .* choose another with --http-port"):
            check_port("127.0.0.1", port, port_option="--http-port")
