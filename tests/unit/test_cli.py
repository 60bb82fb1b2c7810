"""Commands against a service of canned answers, in this process."""

from __future__ import annotations

import json
import socket
import time
from concurrent import futures
from importlib import import_module
from typing import TYPE_CHECKING, get_type_hints

import grpc
import pytest

from legato.cluster.cli import connection
from legato.cluster.cli.app import COMMANDS
from legato.cluster.cli.connection import AddressOption, PortOption, connect
from legato.cluster.cli.json_form import json_dict
from legato.cluster.cli.scale import parse_targets
from legato.cluster.cli.status_table import short_id, status_lines
from legato.cluster.client_calls import scale_request
from legato.cluster.dev_certs import make_certs
from legato.cluster.heartbeat import dial_address
from legato.protos import (
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    generation_pb2,
)
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

    from canned_service import CannedService, Runner

COLOCATED = common_pb2.WORKER_ROLE_COLOCATED
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


Captured = pytest.CaptureFixture[str]


def test_where_nothing_listens_every_command_says_so(run: Runner, capsys: Captured) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        for words in (["generate", "x"], ["status"], ["scale", "decode=2"], ["stop"]):
            assert run.bare(*words, "--port", port) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"legato: no service answers at 127.0.0.1:{port}; start one")
            assert error.count("\n") == 1


def test_an_address_that_can_be_no_host_name_is_nobodys(run: Runner, capsys: Captured) -> None:
    assert run.bare("status", "--address", "a" * 64 + ":1") == 1
    assert capsys.readouterr().err.startswith("legato: no service answers at aaa")


def test_of_several_routers_one_that_is_there_is_asked(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]},127.0.0.1:{run.port}"
        for _ in range(2):
            assert run.bare("generate", "hello", "--raw", "--address", address) == 0
        assert run.bare("scale", "decode=2", "--address", address) == 0
        assert capsys.readouterr().out == "two wörds\ntwo wörds\ntarget: prefill 1, decode 2\n"
        assert run.bare("status", "--address", address) == 0
        first, second = address.split(",")
        told = capsys.readouterr().out
        assert f"requests at {first}: no answer from this router\n" in told
        assert f"requests at {second}: 0 queued, 0 in flight" in told
        assert run.bare("stop", "--address", address) == 0
    assert len(service.requests) == 2


def test_of_several_routers_one_that_hangs_is_left_out(
    run: Runner, service: CannedService, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel makes the connection, and nobody says anything
        address = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{run.port}"
        assert run.bare("status", "--address", address) == 0
        assert "no answer from this router" in capsys.readouterr().out
        assert run.bare("scale", "decode=2", "--address", address) == 0
        with connect(address) as channel:  # as `legato role` and `legato stop` do
            assert cluster_pb2_grpc.ClusterStub(channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=5
            )
    assert service.targets[DECODE] == 2


@pytest.mark.parametrize("address", ["nowhere", "a:1,b", "a:99999", "a:1,,b:2"])
def test_a_wrong_address_is_refused(run: Runner, capsys: Captured, address: str) -> None:
    assert run.bare("status", "--address", address) == 2
    error = capsys.readouterr().err
    assert "must be host:port, or several with commas between them" in error
    assert repr(address) in error


def test_another_grpc_server_is_named_as_such(run: Runner, capsys: Captured) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run.bare("status", "--port", str(port)) == 1
    finally:
        server.stop(0).wait(5)
    assert f"what listens at 127.0.0.1:{port} is no Legato service" in capsys.readouterr().err


def test_who_asks_a_service_of_tls_without_it_is_told_so_at_once(
    run: Runner, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path)
    tls = TlsFiles(str(tmp_path / "service.pem"), str(tmp_path / "service.key"))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    server.start()
    started_s = time.monotonic()
    try:
        for address in (f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}"):
            assert run.bare("generate", "--raw", "hello", "--address", address) == 1
            assert "it may want TLS (--tls-ca, or --tls)" in capsys.readouterr().err
        assert time.monotonic() - started_s < 10  # no outage, whose end would be waited for
        address = f"127.0.0.1:{port},127.0.0.1:{run.port}"
        assert run.bare("generate", "--raw", "hello", "--address", address) == 0
        monkeypatch.setenv("LEGATO_TOKEN", "a-token")
        assert run.bare("generate", "--raw", "hello", "--address", address) == 0
    finally:
        server.stop(0).wait(5)


def test_status_shows_pools_and_workers(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("status") == 0
    text = capsys.readouterr().out
    assert "m: ready" in text
    assert "decode: 1 of 1 ready" in text
    workers, blocks = [line for line in text.splitlines() if line.startswith("decode-01234567 ")]
    assert workers.split()[-7:] == ["11", "12", "13", "1,400", "(15", "returned)", "0"]
    # Free blocks are those that are neither cached nor held: 600 + 90 promised - 250.
    columns = "440 250 310 1,000 90 16 of 1,700 25 % of 1,800 3 GB, 75 % by shared memory"
    assert " ".join(blocks.split()[1:]) == columns
    assert "decode: 1 of 1 ready; prefix hits: 25 % of 1,800 blocks" in text
    service.ready = False
    assert run("status") == 3
    assert "waiting for 1 GPU" in capsys.readouterr().out
    assert run("status", "--json") == 3
    told = capsys.readouterr().out
    load = json.loads(told)["pools"][1]["workers"][0]["load"]
    assert (load["swapped"], load["preemptions_returned"]) == (13, 15)
    worker = json.loads(told)["pools"][1]["workers"][0]
    assert worker["kv_blocks"] == {  # as the table has them
        "free": 440,
        "cached": 250,
        "held": 310,
        "total": 1000,
        "promised": 90,
    }
    assert not {"free_blocks", "total_blocks"} & worker["load"].keys()
    assert (load["swap_held_blocks"], load["prefix_blocks_hit"]) == (16, 450)


def test_scale_sets_the_pools_named(run: Runner, service: CannedService, capsys: Captured) -> None:
    assert run("scale", "decode=3", "--wait", "5") == 0
    assert service.targets == {PREFILL: 1, DECODE: 3}
    assert capsys.readouterr().out == "target: prefill 1, decode 3\n"
    service.ready = False
    assert run("scale", "prefill=0") == 1
    assert service.targets == {PREFILL: 1, DECODE: 3}
    refusal = capsys.readouterr().err
    assert refusal.startswith("legato: nothing is served with no prefill worker; to stop all")
    assert run("scale", "prefill=0", "decode=0") == 1
    assert "no prefill and no decode worker" in capsys.readouterr().err
    assert run("scale", "prefill=0", "--force") == 0
    assert "nothing is served with no prefill worker" in capsys.readouterr().err
    assert run("scale", "decode=3") == 0, "nothing was served before either"
    assert capsys.readouterr().err
    assert run("scale", "colocated=2") == 0
    assert service.targets == {PREFILL: 0, DECODE: 3, COLOCATED: 2}
    said = capsys.readouterr()
    assert said.out == "target: prefill 0, decode 3, colocated 2\n"
    assert said.err == ""
    assert run("scale", "decode=4", "--wait", "0.3") == 1
    assert "not there within 0.3 s: decode: 0 of 1 ready" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["decode"],
        ["decode=-1"],
        ["other=1"],
        ["decode=1", "decode=2"],
        ["decode=1025"],
        ["decode=" + "9" * 5000],
    ],
)
def test_scale_refuses_what_is_no_target(
    run: Runner, service: CannedService, words: list[str]
) -> None:
    assert run("scale", *words) == 2
    assert service.targets == {PREFILL: 1, DECODE: 1}


def test_targets_of_zero_are_set_not_absent() -> None:
    assert parse_targets(["prefill=0"]) == {"prefill": 0}
    (target,) = scale_request({"prefill": 0}).targets
    assert target.HasField("target")
    assert target.target == 0


def test_status_hides_a_pool_that_a_colocated_one_stands_for() -> None:
    answer = cluster_pb2.GetStatusResponse(
        pools=[
            cluster_pb2.PoolStatus(role=PREFILL),
            cluster_pb2.PoolStatus(role=DECODE, message="1 draining"),
            cluster_pb2.PoolStatus(role=COLOCATED, target=2, ready=2),
        ]
    )
    assert status_lines(answer, {})[1:] == ["decode: 1 draining", "colocated: 2 of 2 ready"]


def test_stop_waits_until_the_port_is_closed(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("stop", "--drain", "3") == 0
    assert service.drain_timeout_s == 3
    assert capsys.readouterr().out == "stopped\n"
    assert run("status") == 1


# They ask no service that runs.
LOCAL = {"serve", "config", "doctor", "certs", "demo", "profile", "plan", "experiments"}


def test_every_command_that_asks_a_service_is_told_where_in_the_same_words() -> None:
    for name, module in COMMANDS.items():
        command = getattr(import_module(f"legato.cluster.cli.{module}"), name)
        hints = get_type_hints(command, include_extras=True)
        asked = {word: hints.get(word) for word in ("address", "port")}
        if name in LOCAL:
            assert asked["address"] is None
        else:
            assert asked == {"address": AddressOption, "port": PortOption}, name


def test_numbers_are_numbers_in_json() -> None:
    told = json_dict(
        generation_pb2.Finish(
            usage=generation_pb2.Usage(prompt_tokens=3, seed=2**63 - 1),
            timings=generation_pb2.Timings(ttft_s=float("inf"), kv_bytes_handed_over=5),
        )
    )
    assert told["usage"]["seed"] == 2**63 - 1
    assert told["timings"]["kv_bytes_handed_over"] == 5
    assert told["timings"]["ttft_s"] is None
    answer = cluster_pb2.GetStatusResponse(owner_pid=7)
    answer.pools.add().workers.add().load.kv_bytes_sent = 9
    told = json_dict(answer)
    assert told["owner_pid"] == 7
    assert told["pools"][0]["workers"][0]["load"]["kv_bytes_sent"] == 9
    request = common_pb2.SamplingParams(logit_bias={3: float("-inf")}, seed=0)
    assert json_dict(request)["logit_bias"] == {"3": None}
    assert json_dict(request)["seed"] == 0


def test_version_and_help(run: Runner, capsys: Captured) -> None:
    assert run.bare("--version") == 0
    assert capsys.readouterr().out.strip()
    assert run.bare("--help") == 0
    text = capsys.readouterr().out
    for command in ("serve", "generate", "status", "scale", "role", "stop", "demo"):
        assert command in text


def test_dial_address() -> None:
    assert dial_address("0.0.0.0:1") == "127.0.0.1:1"
    assert dial_address("[::]:1") == "[::1]:1"
    assert dial_address("192.0.2.1:1") == "192.0.2.1:1"


def test_short_id() -> None:
    assert short_id("decode-0123456789abcdef") == "decode-01234567"
    assert short_id("decode-3") == "decode-3"
