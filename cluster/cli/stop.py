"""`legato stop`: ends a service, and says what that cost."""

from __future__ import annotations

import socket
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
from legato.cluster.cli.status import ask
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    import psutil

    from legato.protos import cluster_pb2

POLL_S = 0.2
# After the drain: workers stop, Ray ends.
STOP_SLACK_S = 30.0


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
    began_s, bound_s = time.monotonic(), drain + STOP_SLACK_S
    deadline_s = began_s + bound_s
    num_running, was_cut = now.router.in_flight + now.router.queued, False
    while (open_ := is_open(where, 1.0)) or _lives(owner):
        if time.monotonic() > deadline_s:
            what = f"{where} still accepts connections" if open_ else ""
            if owner is not None and _lives(owner):
                what = f"process {owner.pid} still runs"
            raise ServiceError(f"the service did not end within {bound_s:g} s: {what}")
        # The port closes when all have ended, or when the drain is over and the rest is cut.
        is_over = time.monotonic() - began_s >= drain
        was_cut |= open_ and is_over
        if open_ and not is_over:
            num_running = _num_running(where, num_running)
        time.sleep(POLL_S)
    cut = num_running if was_cut or not drain else 0
    requests = "request was" if cut == 1 else "requests were"
    print(f"stopped; {cut} running {requests} cut after {drain:g} s" if cut else "stopped")


def _num_running(where: str, before: int) -> int:
    """Of all routers at `where`, as they say while they drain; `before` once none answers."""
    counts = []
    for address in where.split(","):
        try:
            router = ask(address).router
        except ServiceError:  # it has ended
            continue
        counts.append(router.in_flight + router.queued)
    return sum(counts) if counts else before


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
