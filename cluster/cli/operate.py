"""`legato status`, `legato scale`, `legato stop`: what an operator types."""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import (
    CALL_TIMEOUT_S,
    AddressOption,
    PortOption,
    choose_address,
    connect,
    connect_client,
    is_open,
)
from legato.cluster.cli.status_table import kv_table, role_name, status_lines, worker_table
from legato.cluster.errors import ServiceError
from legato.cluster.pool import MAX_POOL_SIZE

if TYPE_CHECKING:
    import psutil

    from legato.cluster.control_plane import Role
    from legato.protos import cluster_pb2

POLL_S = 0.2
# After the drain: workers stop, Ray ends.
STOP_SLACK_S = 30.0


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Show pools, workers and each router's requests.

    Of the routers of --address. Exit code 3 while the service is not ready.

    Examples:

        legato status

        legato status --json | jq .pools
    """
    told = _ask_each(choose_address(address, port).split(","))
    answer = next(answer for answer in told.values() if answer is not None)
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

        routers = {where: told_by and told_by.router for where, told_by in told.items()}
        for line in status_lines(answer, routers):
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
    """Set how many workers a pool has.

    Pools that are not named stay as they are. The running streams of workers that go move to others, or end, first.

    Examples:

        legato scale prefill=2

        legato scale prefill=2 decode=3 --wait 120
    """
    wanted = parse_targets(targets)
    with connect_client(choose_address(address, port)) as client:
        sizes = client.scale(wanted)
        print("target: " + ", ".join(f"{role} {size}" for role, size in sizes.items()))
        empty = [role for role, size in sizes.items() if not size and role != "colocated"]
        if empty and not sizes.get("colocated"):
            print(f"nothing is served with no {' and no '.join(empty)} worker", file=sys.stderr)
        deadline_s = time.monotonic() + (wait or 0)
        while wait is not None:
            pools = client.status().pools
            late = [f"{role_name(pool.role)}: {pool.message}" for pool in pools if pool.message]
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
    """End the service; running requests may finish.

    New ones are refused at once. In the end no process is left.
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


def parse_targets(words: list[str]) -> dict[Role, int]:
    """Raises BadParameter naming the word that is wrong."""
    from legato.cluster.roles import ROLES

    roles: dict[str, Role] = {role: role for role in ROLES}
    targets: dict[Role, int] = {}
    for word in words:
        pool, _, size = word.partition("=")
        if pool not in roles or not size.isascii() or not size.isdigit():
            names = " or ".join(f"{role}=N" for role in roles)
            raise typer.BadParameter(f"must be {names} with N >= 0, got {word!r}")
        role = roles[pool]
        if role in targets:
            raise typer.BadParameter(f"{role} is given twice")
        if int(size) > MAX_POOL_SIZE:
            raise typer.BadParameter(f"{role} must be in [0, {MAX_POOL_SIZE}], got {size}")
        targets[role] = int(size)
    return targets


def _ask_each(addresses: list[str]) -> dict[str, cluster_pb2.GetStatusResponse | None]:
    """Of several routers those that do not answer have None, unless none does; at once."""
    with ThreadPoolExecutor(len(addresses)) as threads:
        calls = {address: threads.submit(_ask, address) for address in addresses}
    errors = [error for call in calls.values() if (error := call.exception()) is not None]
    if len(errors) == len(calls):
        raise errors[0]
    return {
        address: call.result() if call.exception() is None else None
        for address, call in calls.items()
    }


def _ask(address: str) -> cluster_pb2.GetStatusResponse:
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    with connect(address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)


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
