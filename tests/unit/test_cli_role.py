"""`legato role` against a service of canned answers, in this process."""

from __future__ import annotations

import sys
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from legato.cluster.cli import main as cli
from legato.cluster.cli import role as role_command
from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
READY, STARTING = common_pb2.WORKER_PHASE_READY, common_pb2.WORKER_PHASE_STARTING
DRAINING = common_pb2.WORKER_PHASE_DRAINING
OLD, NEW = "prefill-0123456789abcdef", "decode-fedcba9876543210"
Captured = pytest.CaptureFixture[str]


def worker(worker_id: str, role: int, phase: int, predecessor: str = "") -> object:
    return cluster_pb2.WorkerStatus(
        worker_id=worker_id,
        role=role,  # type: ignore[arg-type]  # enum values are ints at run time
        phase=phase,  # type: ignore[arg-type]  # as above
        predecessor=predecessor,
        load=common_pb2.WorkerLoad(running=3, waiting=1),
    )


class CannedCluster(cluster_pb2_grpc.ClusterServicer):
    """Tells its workers in a list, one entry a call; the last one again and again."""

    def __init__(self, *told: object) -> None:
        self.told = list(told)
        self.asked: list[cluster_pb2.ChangeRoleRequest] = []
        self.num_looks = 0
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def ChangeRole(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ChangeRoleRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ChangeRoleResponse:
        self.asked.append(request)
        if request.worker_id == "nobody":
            context.abort(grpc.StatusCode.NOT_FOUND, "no worker has an id that begins with …")
        targets = {PREFILL: 1, DECODE: 2}
        return cluster_pb2.ChangeRoleResponse(
            worker_id=OLD,
            targets=[cluster_pb2.PoolTarget(role=r, target=n) for r, n in targets.items()],
        )

    def GetStatus(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetStatusResponse:
        self.num_looks += 1
        found = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        pool = cluster_pb2.PoolStatus(role=DECODE, message="1 of 2 ready")
        pool.workers.extend([] if found is None else [found])  # type: ignore[list-item]  # `worker` makes them
        return cluster_pb2.GetStatusResponse(ready=True, pools=[pool])


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CannedCluster]]:
    monkeypatch.setattr(role_command, "POLL_S", 0.01)
    made: list[CannedCluster] = []
    yield made
    for each in made:
        each.server.stop(0).wait(5)


def run(cluster: CannedCluster, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["legato", "role", *words, "--port", str(cluster.port)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_it_waits_until_the_worker_serves_in_its_new_role(
    clusters: list[CannedCluster], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    cluster = CannedCluster(
        worker(OLD, PREFILL, DRAINING),
        worker("decode-2", DECODE, STARTING, OLD),
        worker(NEW, DECODE, READY, OLD),
    )
    clusters.append(cluster)
    assert run(cluster, monkeypatch, "prefill-01", "decode") == 0
    [asked] = cluster.asked
    assert (asked.worker_id, asked.role) == ("prefill-01", DECODE)
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == "target: prefill 1, decode 2"
    assert "prefill-01234567 is decode-fedcba98 now, after" in said.out
    assert said.err.splitlines() == [
        "prefill-01234567 drains: 4 sequences are left",
        "decode worker starting",
    ]


def test_without_a_wait_it_asks_and_returns(
    clusters: list[CannedCluster], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    clusters.append(CannedCluster(None))
    assert run(clusters[0], monkeypatch, "prefill-01", "decode", "--no-wait") == 0
    assert clusters[0].num_looks == 0
    assert "finishes its streams, then it is a decode worker" in capsys.readouterr().out


def test_a_worker_that_ends_on_the_way_is_an_error_that_says_what_follows(
    clusters: list[CannedCluster], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    clusters.append(CannedCluster(worker(OLD, PREFILL, DRAINING), None))
    assert run(clusters[0], monkeypatch, "prefill-01", "decode") == 1
    assert (
        "prefill-01234567 ended before it had its new role; the pool starts another worker "
        "instead (decode: 1 of 2 ready)" in capsys.readouterr().err
    )


def test_a_wait_has_its_bound(
    clusters: list[CannedCluster], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    clusters.append(CannedCluster(worker(OLD, PREFILL, DRAINING)))
    assert run(clusters[0], monkeypatch, "prefill-01", "decode", "--timeout", "0.2") == 1
    assert "not there within 0.2 s: prefill-01234567 drains" in capsys.readouterr().err


def test_what_is_wrong_is_said(
    clusters: list[CannedCluster], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    clusters.append(CannedCluster(None))
    assert run(clusters[0], monkeypatch, "prefill-01", "router") == 2
    assert "ROLE: must be prefill or decode" in capsys.readouterr().err
    assert clusters[0].asked == []
    assert run(clusters[0], monkeypatch, "nobody", "decode") == 1
    assert "NOT_FOUND: no worker has an id" in capsys.readouterr().err
