"""`legato top`, `drain`, `stop` and `--json` against a cluster of canned answers."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest
from rich.console import Console

from legato.cluster.cli import drain as drain_command
from legato.cluster.cli import main as cli
from legato.cluster.cli import stop as stop_command
from legato.cluster.cli import top as top_command
from legato.cluster.cli.status_table import kv_sent, size_words
from legato.cluster.cli.top_view import BAR_CELLS, Look, kv_bar, rates, top_view
from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

DECODE, PREFILL = common_pb2.WORKER_ROLE_DECODE, common_pb2.WORKER_ROLE_PREFILL
READY = common_pb2.WORKER_PHASE_READY
WORKER = "decode-0123456789abcdef"
TOKEN = "a-token-of-an-operator-1"
Captured = pytest.CaptureFixture[str]


def load(**more: int) -> common_pb2.WorkerLoad:
    blocks = {"total_blocks": 100, "free_blocks": 40, "reserved_blocks": 10, "held_blocks": 50}
    return common_pb2.WorkerLoad(cached_blocks=20, **{**blocks, **more})


class CannedCluster(cluster_pb2_grpc.ClusterServicer):
    """One decode worker; each look at it finds 100 decoded tokens more."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.in_flight = 3
        self.drained: list[str] = []
        self.looks_until_gone = 2
        self.closes_after = -1  # looks after Shutdown; -1: with it
        self.ending = False
        self.num_cut = 0
        self.drain_left_s: float | None = None
        self.drains_for_s = 0.0
        self.end_authorization: object = None
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def GetStatus(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetStatusResponse:
        self.num_looks += 1
        pool = cluster_pb2.PoolStatus(role=DECODE, target=1, ready=1)
        if not self.drained or self.looks_until_gone > 0:
            worker = cluster_pb2.WorkerStatus(worker_id=WORKER, role=DECODE, phase=READY)
            worker.load.CopyFrom(load(running=2, waiting=1, decode_tokens=100 * self.num_looks))
            pool.workers.append(worker)
        self.looks_until_gone -= bool(self.drained)
        if self.ending:
            self.closes_after -= 1
            if self.closes_after == 0:
                threading.Thread(target=lambda: self.server.stop(0).wait(5)).start()
        return cluster_pb2.GetStatusResponse(
            model="m",
            ready=True,
            pools=[cluster_pb2.PoolStatus(role=PREFILL, target=1, ready=1), pool],
            router=cluster_pb2.RouterStatus(
                in_flight=self.in_flight, queued=4, drain_left_s=self.drain_left_s
            ),
        )

    def DrainWorker(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.DrainWorkerRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.DrainWorkerResponse:
        if request.worker_id == "nobody":
            context.abort(grpc.StatusCode.NOT_FOUND, "no worker has an id that begins with …")
        self.drained.append(request.worker_id)
        return cluster_pb2.DrainWorkerResponse(worker_id=WORKER)

    def DrainNode(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.DrainNodeResponse:
        self.drained.append(request.node)
        return cluster_pb2.DrainNodeResponse(worker_ids=[] if request.node == "empty" else [WORKER])

    def ScalePool(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ScalePoolRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ScalePoolResponse:
        return cluster_pb2.ScalePoolResponse(targets=request.targets)

    def Shutdown(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ShutdownResponse:
        self.ending = True
        self.end_authorization = dict(context.invocation_metadata()).get("authorization")
        if self.closes_after < 0:
            self.server.stop(0.2)
        else:
            time.sleep(self.drains_for_s)
            self.server.stop(0.2)
        return cluster_pb2.ShutdownResponse(num_cut=self.num_cut if request.wait else None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedCluster]:
    monkeypatch.setattr(drain_command, "POLL_S", 0.01)
    monkeypatch.setattr(stop_command, "POLL_S", 0.05)
    canned = CannedCluster()
    yield canned
    canned.server.stop(0).wait(5)


def run(monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["legato", *words, "--port", str(cluster.port)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_drain_says_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    assert run(monkeypatch, cluster, "drain", "decode-01") == 0
    out, err = capsys.readouterr()
    assert cluster.drained == ["decode-01"]
    begun, gone = out.splitlines()
    assert begun == "decode-01234567 drains; another worker is started in its place"
    assert re.fullmatch(r"decode-01234567 is gone after 0\.\d s; decode: 1 of 1 ready", gone)
    assert err == "decode-01234567 drains: 3 sequences are left\n"


def test_drain_as_json_without_waiting_and_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    assert run(monkeypatch, cluster, "drain", "decode-01", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["worker_id"], told["gone"], told["pool"]) == (WORKER, True, "1 of 1 ready")
    assert run(monkeypatch, cluster, "drain", "decode-01", "--no-wait", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"worker_id": WORKER, "gone": False}
    cluster.looks_until_gone = 10**6
    assert run(monkeypatch, cluster, "drain", "decode-01", "--timeout", "0.1") == 1
    assert "not gone within 0.1 s: decode-01234567 drains: 3" in capsys.readouterr().err
    assert run(monkeypatch, cluster, "drain", "nobody") == 1
    assert "NOT_FOUND: no worker has an id" in capsys.readouterr().err


def test_a_node_is_drained_until_its_workers_are_gone(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    cluster.looks_until_gone = 2
    assert run(monkeypatch, cluster, "drain", "--node", "10.0.0.7") == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"node 10\.0\.0\.7 is without workers after 0\.\d s: decode-01234567\n", out
    )
    assert (cluster.drained, err) == (
        ["10.0.0.7"],
        "decode-01234567 drains: 3 sequences are left\n",
    )
    assert run(monkeypatch, cluster, "drain", "--node", "empty") == 0
    assert capsys.readouterr().out == "node empty takes no workers any more; none is there\n"
    assert run(monkeypatch, cluster, "drain", "--node", "here", "--no-wait", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"node": "here", "worker_ids": [WORKER], "gone": False}
    cluster.looks_until_gone = 10**6
    assert run(monkeypatch, cluster, "drain", "--node", "here", "--timeout", "0.1") == 1


@pytest.mark.parametrize("words", [[], ["decode-01", "--node", "here"]])
def test_a_drain_wants_a_worker_or_a_node(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured, words: list[str]
) -> None:
    assert run(monkeypatch, cluster, "drain", *words) == 2
    assert "must be a worker's id or --node, one of the two" in capsys.readouterr().err


def test_scale_as_json(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    assert run(monkeypatch, cluster, "scale", "decode=1", "--wait", "5", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"targets": {"decode": 1}, "ready": {"prefill": 1, "decode": 1}, "messages": []}


@pytest.mark.parametrize(
    ("drain_s", "num_cut", "told"),
    [
        ("0", 7, "stopped; 7 running requests were cut\n"),
        ("3", 1, "stopped; 1 running request was cut\n"),
        ("60", 0, "stopped\n"),
    ],
)
def test_stop_says_how_many_requests_were_cut(
    monkeypatch: pytest.MonkeyPatch,
    cluster: CannedCluster,
    capsys: Captured,
    drain_s: str,
    num_cut: int,
    told: str,
) -> None:
    cluster.num_cut = num_cut
    assert run(monkeypatch, cluster, "stop", "--drain", drain_s) == 0
    assert capsys.readouterr().out == told


def test_stop_takes_a_slow_end_of_the_process_for_no_cut(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    ended_s = time.monotonic() + 1.0
    monkeypatch.setattr(stop_command, "_lives", lambda _: time.monotonic() < ended_s)
    assert run(monkeypatch, cluster, "stop", "--drain", "0.7") == 0  # the port closes after 0.2 s
    assert time.monotonic() >= ended_s
    assert capsys.readouterr().out == "stopped\n"


def test_stop_waits_where_somebody_gives_more_time_meanwhile(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    monkeypatch.setattr(stop_command, "STOP_SLACK_S", 0.5)
    cluster.closes_after, cluster.drains_for_s = 10**6, 2.0
    cluster.drain_left_s, cluster.num_cut = 60.0, 1
    assert run(monkeypatch, cluster, "stop", "--drain", "0.5") == 0
    assert capsys.readouterr().out == "stopped; 1 running request was cut\n"


def test_stop_shows_its_token(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    monkeypatch.setenv("LEGATO_TOKEN", TOKEN)
    assert run(monkeypatch, cluster, "stop") == 0
    assert capsys.readouterr().out == "stopped\n"
    assert cluster.end_authorization == f"Bearer {TOKEN}"


# --- top ---------------------------------------------------------------------------------------


def look(at_s: float, tokens: int, *, name: str = WORKER) -> Look:
    worker = cluster_pb2.WorkerStatus(worker_id=name, role=DECODE, phase=READY)
    worker.load.CopyFrom(load(running=2, decode_tokens=tokens, prefill_tokens=tokens))
    pool = cluster_pb2.PoolStatus(role=DECODE, target=1, ready=1, workers=[worker])
    answer = cluster_pb2.GetStatusResponse(model="m", ready=True, pools=[pool])
    return Look(at_s, {"a:1": answer, "b:2": None})


def shown(*looks: Look) -> str:
    console = Console(width=80, force_terminal=False, record=True, file=io.StringIO())
    console.print(top_view(*looks))
    return console.export_text()


def test_rates_are_between_two_looks() -> None:
    assert rates(look(12.0, 600), look(10.0, 100)) == {WORKER: 500.0}
    assert rates(look(12.0, 100), look(10.0, 600)) == {WORKER: 0.0}  # it was started anew
    assert rates(look(12.0, 1), look(10.0, 0, name="decode-other")) == {}
    assert rates(look(10.0, 1), look(10.0, 1)) == {}


@pytest.mark.parametrize(
    ("blocks", "cells"),
    [
        ({"free_blocks": 80, "reserved_blocks": 0, "held_blocks": 0, "cached_blocks": 0}, (0, 0)),
        ({"held_blocks": 50, "cached_blocks": 25}, (10, 5)),
        ({"held_blocks": 1, "cached_blocks": 1}, (1, 1)),  # what is there has a cell
        ({"held_blocks": 100, "cached_blocks": 0}, (BAR_CELLS, 0)),
        ({"held_blocks": 98, "cached_blocks": 2}, (BAR_CELLS, 0)),
    ],
)
def test_the_bar_of_kv_blocks(blocks: dict[str, int], cells: tuple[int, int]) -> None:
    text = kv_bar(common_pb2.WorkerLoad(total_blocks=100, **blocks)).plain
    assert (text.count("█"), text.count("▒")) == cells
    assert text.count("█") + text.count("▒") + text.count("·") == BAR_CELLS
    assert kv_bar(common_pb2.WorkerLoad()).plain == "-"


def test_the_view_has_pools_workers_and_the_queue() -> None:
    text = shown(look(12.0, 600), look(10.0, 100))
    assert "requests at a:1: 0 queued, 0 in flight" in text
    assert "requests at b:2: no answer from this router" in text
    (row,) = [line for line in text.splitlines() if line.startswith("decode-01234567")]
    assert re.search(r"ready\s+█+▒+·+\s+50 %\s+2\s+0\s+500\.0", row)


def test_a_lost_router_leaves_the_last_view_with_its_age() -> None:
    text = shown(look(12.0, 600), look(10.0, 100), Look(17.4, {}, "no service answers at a:1"))
    assert text.startswith("as 5 s ago: no service answers at a:1")
    assert "decode-01234567" in text


def test_once_shows_one_interval(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster, capsys: Captured
) -> None:
    assert run(monkeypatch, cluster, "top", "--once", "--interval", "0.2") == 0
    out = capsys.readouterr().out
    assert cluster.num_looks == 2
    rate = re.search(r"decode-01234567 .* ([\d.]+)\s*$", out, flags=re.MULTILINE)
    assert rate is not None
    assert 0 < float(rate[1]) <= 500
    assert "4 queued, 3 in flight" in out


def test_the_live_view_goes_on_when_the_router_restarts(
    monkeypatch: pytest.MonkeyPatch, cluster: CannedCluster
) -> None:
    views: list[tuple[Look, ...]] = []
    real = top_command.top_view

    def note(*looks: Look) -> object:
        views.append(looks)
        if len(views) == 3:
            monkeypatch.setattr(top_command, "ask_each", lost)
        if len(views) == 5:
            monkeypatch.setattr(top_command, "ask_each", asked)
        if len(views) == 7:
            raise KeyboardInterrupt
        return real(*looks)

    def lost(_: object) -> object:
        raise top_command.ServiceError("the service is gone")

    asked = top_command.ask_each
    monkeypatch.setattr(top_command, "top_view", note)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(monkeypatch, cluster, "top", "--interval", "0.1") == 0
    assert [len(looks) for looks in views] == [2, 2, 2, 3, 3, 2, 2]
    assert views[4][0] is views[2][0], "the last that was seen stays"
    now, before = views[5][:2]
    assert before is views[2][0]
    assert now.at_s > before.at_s


def test_the_live_view_in_a_terminal_of_80_columns(cluster: CannedCluster) -> None:
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "legato.cluster.cli.main", "top", "--interval", "0.1"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    top = subprocess.Popen(
        [*command, "--port", str(cluster.port)], stdin=its, stdout=its, stderr=its, env=env
    )
    os.close(its)
    shown, deadline_s = b"", time.monotonic() + 30
    try:
        while b"free" not in shown or b"tokens/s" not in shown:
            assert time.monotonic() < deadline_s, shown
            if select.select([mine], [], [], 0.5)[0]:
                shown += os.read(mine, 65536)
        top.send_signal(signal.SIGINT)
        assert top.wait(20) == 0
    finally:
        top.kill()
        top.wait()
        os.close(mine)
    lines = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode(errors="replace").splitlines()
    (row, *_) = [line for line in lines if "decode-01234567" in line]
    assert re.search(r"ready\s+█+▒+·+\s+50 %\s+2\s+1\s", row), "it is folded"


def test_top_where_nobody_is(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys, "argv", ["legato", "top", "--once", "--port", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "no service answers at 127.0.0.1:1" in capsys.readouterr().err


def test_the_lane_that_kv_went_by() -> None:
    assert kv_sent(common_pb2.WorkerLoad()) == "-"
    half = common_pb2.WorkerLoad(kv_bytes_sent=4000, kv_bytes_sent_by_memory=2000)
    assert kv_sent(half) == "4 KB, 50 % by shared memory"
    assert kv_sent(common_pb2.WorkerLoad(kv_bytes_sent=5)) == "5 B, gRPC"
    assert size_words(1.5e13) == "15 TB"
