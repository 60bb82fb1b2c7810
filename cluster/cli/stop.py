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
    import grpc
    import psutil

    from legato.protos import cluster_pb2

POLL_S = 0.2
# After the drain: workers stop, Ray ends.
STOP_SLACK_S = 30.0
MOST_DRAIN_S = 600.0


def stop(
    drain: Annotated[
        float, typer.Option(min=0, max=MOST_DRAIN_S, help="Seconds that running requests have.")
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
        request = cluster_pb2.ShutdownRequest(drain_timeout_s=drain, wait=True)
        ending = stub.Shutdown.future(request, timeout=MOST_DRAIN_S + STOP_SLACK_S)
        num_cut = _await_end(where, owner, ending, drain)
    requests = "request was" if num_cut == 1 else "requests were"
    print(f"stopped; {num_cut} running {requests} cut" if num_cut else "stopped")


def _await_end(
    where: str,
    owner: psutil.Process | None,
    ending: grpc.Future[cluster_pb2.ShutdownResponse],
    drain_s: float,
) -> int:
    """Returns how many requests were cut, when the port is closed and the process is gone.

    Raises:
        ServiceError: they are not within the bound: of the drain, or of a later one.
        RpcError: the end was refused.
    """
    bound_s = drain_s + STOP_SLACK_S
    began_s = time.monotonic()
    while (open_ := is_open(where, 1.0)) or _lives(owner):
        if ending.done():
            _num_cut(ending)  # raises where it was refused
        if time.monotonic() > began_s + bound_s:
            what = f"{where} still accepts connections" if open_ else ""
            if owner is not None and _lives(owner):
                what = f"process {owner.pid} still runs"
            raise ServiceError(f"the service did not end within {bound_s:.0f} s: {what}")
        if open_:  # somebody may have given running requests more time
            left_s = _drain_left_s(where)
            bound_s = max(
                bound_s, time.monotonic() - began_s + left_s + STOP_SLACK_S * bool(left_s)
            )
        time.sleep(POLL_S)
    return _num_cut(ending)


def _num_cut(ending: grpc.Future[cluster_pb2.ShutdownResponse]) -> int:
    import grpc

    try:
        return int(ending.result(timeout=1.0).num_cut)
    except grpc.FutureTimeoutError:
        return 0
    except grpc.RpcError as error:
        gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        if isinstance(error, grpc.Call) and error.code() in gone:  # its process was killed
            return 0
        raise


def _drain_left_s(where: str) -> float:
    """The most that any router at `where` tells; 0 where none drains, or none answers."""
    left_s = 0.0
    for address in where.split(","):
        try:
            left_s = max(left_s, ask(address).router.drain_left_s)
        except ServiceError:  # it has ended
            continue
    return left_s


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
