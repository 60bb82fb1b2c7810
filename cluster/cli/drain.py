"""`legato drain`: takes one worker out, or all of a node, and shows how their streams leave."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, cast

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
    from collections.abc import Mapping

    from legato.protos import cluster_pb2, cluster_pb2_grpc

POLL_S = 0.2


def drain(
    worker: Annotated[
        str | None,
        typer.Argument(help="A worker's id, or how it begins, as `legato status` shows it."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            help="In place of a worker: all of this node, by its address or host name. Nothing is "
            "started there any more.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Until it is gone, for up to --timeout.")] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds; its running streams move or end first.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Take one worker out, or all of a node; others are started in their place.

    A worker that goes gets nothing new; its running streams move to others with their KV, or end;
    then its process ends. The pool keeps its size: to have one worker less, use `legato scale`.

    The last ready worker of a pool serves until the one in its place is ready.

    A node is drained where its machine is to go: Ray, too, puts nothing more there.

    Examples:

        legato drain decode-1a2b3c4d

        legato drain prefill-5e6f --no-wait --json

        legato drain --node 10.0.0.7
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    if (worker is None) is (node is None):
        raise typer.BadParameter("must be a worker's id or --node, one of the two")
    with connect(choose_address(address, port)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        began_s = time.monotonic()
        if node is not None:
            told = _drain_node(stub, node, began_s + timeout if wait else None, timeout)
            print(json.dumps(told) if as_json else _node_line(told))
            return
        request = cluster_pb2.DrainWorkerRequest(worker_id=worker or "")
        worker_id = stub.DrainWorker(request, timeout=CALL_TIMEOUT_S).worker_id
        shown = short_id(worker_id)
        if not as_json:
            print(f"{shown} drains; another worker is started in its place")
        told = {"worker_id": worker_id, "gone": False}
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


def _drain_node(
    stub: cluster_pb2_grpc.ClusterStub, node: str, deadline_s: float | None, timeout_s: float
) -> dict[str, object]:
    """All its workers at once; with a deadline, until the last is gone."""
    from legato.protos import cluster_pb2

    began_s = time.monotonic()
    request = cluster_pb2.DrainNodeRequest(node=node)
    worker_ids = list(stub.DrainNode(request, timeout=CALL_TIMEOUT_S).worker_ids)
    told: dict[str, object] = {"node": node, "worker_ids": worker_ids, "gone": False}
    if deadline_s is not None:
        for worker_id in worker_ids:
            _wait(stub, worker_id, deadline_s, timeout_s)
        told |= {"gone": True, "took_s": round(time.monotonic() - began_s, 3)}
    return told


def _node_line(told: Mapping[str, object]) -> str:
    worker_ids = cast("list[str]", told["worker_ids"])
    if not worker_ids:
        return f"node {told['node']} takes no workers any more; none is there"
    shown = ", ".join(map(short_id, worker_ids))
    if not told["gone"]:
        return f"node {told['node']} drains: {shown}; others are started elsewhere"
    return f"node {told['node']} is without workers after {told['took_s']:.1f} s: {shown}"


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
