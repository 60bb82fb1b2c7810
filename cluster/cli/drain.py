"""`legato drain`: takes one worker out, and shows how its streams leave it."""

from __future__ import annotations

import json
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
)
from legato.cluster.cli.status_table import role_name, short_id
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.protos import cluster_pb2, cluster_pb2_grpc

POLL_S = 0.2


def drain(
    worker: Annotated[
        str, typer.Argument(help="A worker's id, or how it begins, as `legato status` shows it.")
    ],
    wait: Annotated[bool, typer.Option(help="Until it is gone, for up to --timeout.")] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds; its running streams move or end first.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Take one worker out; another is started in its place.

    It gets nothing new; its running streams move to other workers with their KV, or end; then its
    process ends. The pool keeps its size: to have one worker less, use `legato scale`.

    Examples:

        legato drain decode-1a2b3c4d

        legato drain prefill-5e6f --no-wait --json
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    request = cluster_pb2.DrainWorkerRequest(worker_id=worker)
    with connect(choose_address(address, port)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        began_s = time.monotonic()
        worker_id = stub.DrainWorker(request, timeout=CALL_TIMEOUT_S).worker_id
        shown = short_id(worker_id)
        if not as_json:
            print(f"{shown} drains; another worker is started in its place")
        told: dict[str, object] = {"worker_id": worker_id, "gone": False}
        if wait:
            pool = _wait(stub, worker_id, began_s + timeout, timeout)
            took_s = round(time.monotonic() - began_s, 3)
            state = f"{pool.ready} of {pool.target} ready" if pool is not None else "no pool"
            told |= {"gone": True, "took_s": took_s, "pool": state}
            if not as_json:
                name = "" if pool is None else f"{role_name(pool.role)}: "
                print(f"{shown} is gone after {took_s:.1f} s; {name}{state}")
    if as_json:
        print(json.dumps(told))


def _wait(
    stub: cluster_pb2_grpc.ClusterStub, worker_id: str, deadline_s: float, timeout_s: float
) -> cluster_pb2.PoolStatus | None:
    """Until no pool has it any more; the pool that it was of, as it is then."""
    from legato.protos import cluster_pb2

    role, told = 0, ""
    while True:
        now = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        found = [w for pool in now.pools for w in pool.workers if w.worker_id == worker_id]
        if not found:
            return next((pool for pool in now.pools if pool.role == role), None)
        role, load = found[0].role, found[0].load
        state = f"{short_id(worker_id)} drains: {load.running + load.waiting} sequences are left"
        if state != told:
            print(state, file=sys.stderr)
            told = state
        if time.monotonic() > deadline_s:
            raise ServiceError(f"not gone within {timeout_s:g} s: {state}")
        time.sleep(POLL_S)
