"""`legato status`, `legato scale`, `legato stop`: what an operator types."""

from __future__ import annotations

import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import (
    CALL_TIMEOUT_S,
    AddressOption,
    PortOption,
    choose_address,
    connect,
    is_open,
)
from legato.cluster.cli.status_table import kv_table, role_name, status_lines, worker_table
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    import psutil

    from legato.protos import cluster_pb2

POLL_S = 0.2
# After the drain: workers stop, Ray ends.
STOP_SLACK_S = 30.0


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Show pools, workers and the queue. Exit code 3 while the service is not ready.

    Examples:

        legato status

        legato status --json | jq .pools
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    with connect(choose_address(address, port)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
    if as_json:
        from google.protobuf.json_format import MessageToJson

        print(
            MessageToJson(
                answer,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
        )
    else:
        from rich.console import Console

        for line in status_lines(answer):
            print(line)
        # A pipe has no width: there nothing is shortened to fit.
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(worker_table(answer))
        console.print(kv_table(answer))
    if not answer.ready:
        raise typer.Exit(3)


def scale(
    targets: Annotated[
        list[str], typer.Argument(help="prefill=N, decode=N, colocated=N: one or more.")
    ],
    wait: Annotated[
        float | None,
        typer.Option(min=0.1, help="Wait up to so many seconds until the pools are there."),
    ] = None,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Set how many workers a pool has; pools that are not named stay as they are.

    Workers that go finish their running streams first.

    Examples:

        legato scale prefill=2

        legato scale prefill=2 decode=3 --wait 120
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    request = cluster_pb2.ScalePoolRequest(targets=parse_targets(targets))
    with connect(choose_address(address, port)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.ScalePool(request, timeout=CALL_TIMEOUT_S)
        print("target: " + ", ".join(f"{role_name(t.role)} {t.target}" for t in answer.targets))
        sizes = {role_name(t.role): t.target for t in answer.targets}
        empty = [role for role, size in sizes.items() if not size and role != "colocated"]
        if empty and not sizes.get("colocated"):
            print(f"nothing is served with no {' and no '.join(empty)} worker", file=sys.stderr)
        deadline_s = time.monotonic() + (wait or 0)
        while wait is not None:
            now = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
            late = [f"{role_name(pool.role)}: {pool.message}" for pool in now.pools if pool.message]
            if not late:
                break
            if time.monotonic() > deadline_s:
                raise ServiceError(f"not there within {wait:g} s: {'; '.join(late)}")
            time.sleep(POLL_S)


def stop(
    drain: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds that running requests have.")
    ] = 10.0,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """End the service: no new requests, running ones may finish, then every process ends.

    Returns when the port is closed and, on the same machine, its process is gone.

    Examples:

        legato stop

        legato stop --port 50052 --drain 60
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    where = choose_address(address, port)
    with connect(where) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        now = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        owner = _owner_process(now)
        stub.Shutdown(cluster_pb2.ShutdownRequest(drain_timeout_s=drain), timeout=CALL_TIMEOUT_S)
    bound_s = drain + STOP_SLACK_S
    deadline_s = time.monotonic() + bound_s
    while (open_ := is_open(where, 1.0)) or _lives(owner):
        if time.monotonic() > deadline_s:
            what = f"{where} still accepts connections" if open_ else ""
            if owner is not None and _lives(owner):
                what = f"process {owner.pid} still runs"
            raise ServiceError(f"the service did not end within {bound_s:g} s: {what}")
        time.sleep(POLL_S)
    print("stopped")


def parse_targets(words: list[str]) -> list[cluster_pb2.PoolTarget]:
    """Raises BadParameter naming the word that is wrong."""
    from legato.cluster.roles import WIRE_ROLES
    from legato.protos import cluster_pb2

    roles = {str(role): number for role, number in WIRE_ROLES.items()}
    targets: dict[str, cluster_pb2.PoolTarget] = {}
    for word in words:
        pool, _, size = word.partition("=")
        if pool not in roles or not size.isascii() or not size.isdigit():
            names = " or ".join(f"{role}=N" for role in roles)
            raise typer.BadParameter(f"must be {names} with N >= 0, got {word!r}")
        if pool in targets:
            raise typer.BadParameter(f"{pool} is given twice")
        if int(size) > 1024:
            raise typer.BadParameter(f"{pool} must be in [0, 1024], got {size}")
        targets[pool] = cluster_pb2.PoolTarget(role=roles[pool], target=int(size))
    return list(targets.values())


def _owner_process(answer: cluster_pb2.GetStatusResponse) -> psutil.Process | None:
    """Taken before the end begins, so that a reused pid is not mistaken for it."""
    import psutil

    if answer.owner_host != socket.gethostname() or not answer.owner_pid:
        return None
    try:
        return psutil.Process(answer.owner_pid)
    except psutil.NoSuchProcess:
        return None  # another pid namespace: the port is all that can be watched


def _lives(process: psutil.Process | None) -> bool:
    import psutil

    if process is None:
        return False
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
