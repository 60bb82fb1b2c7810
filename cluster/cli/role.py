"""`legato role`: a warm worker goes on in another role."""

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
    from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2

POLL_S = 0.2


def role(
    worker: Annotated[
        str, typer.Argument(help="A worker's id, or how it begins, as `legato status` shows it.")
    ],
    new_role: Annotated[
        str, typer.Argument(metavar="ROLE", help="What it is to be: prefill, decode or colocated.")
    ],
    wait: Annotated[
        bool, typer.Option(help="Until it serves in its new role, for up to --timeout.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds; its running streams move or end first.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Let a running worker go on in another role.

    The weights are not loaded again. It takes no new work; its running streams move to other
    workers, or end; then it serves under another id. Its old pool is to be one smaller, its new one
    larger. The last ready worker of a pool stays.

    Examples:

        legato role prefill-1a2b3c4d decode

        legato role decode-5e6f prefill --no-wait
    """
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    request = cluster_pb2.ChangeRoleRequest(worker_id=worker, role=parse_role(new_role))
    with connect(choose_address(address, port)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.ChangeRole(request, timeout=CALL_TIMEOUT_S)
        old = short_id(answer.worker_id)
        targets = {role_name(target.role): target.target for target in answer.targets}
        if not as_json:
            print(f"{old} drains, then it is a {new_role} worker")
            print("target: " + ", ".join(f"{name} {size}" for name, size in targets.items()))
        began_s = time.monotonic()
        new = _wait(stub, answer.worker_id, timeout) if wait else None
        took_s = round(time.monotonic() - began_s, 3)
        if as_json:
            told = {"worker_id": answer.worker_id, "becomes": new, "targets": targets}
            print(json.dumps(told | ({"took_s": took_s} if wait else {})))
        elif new is not None:
            print(f"{old} is {short_id(new)} now, after {took_s:.1f} s")


def parse_role(word: str) -> common_pb2.WorkerRole.ValueType:
    """Raises BadParameter naming the word where it is none."""
    from legato.cluster.roles import WIRE_ROLES

    roles: dict[str, common_pb2.WorkerRole.ValueType] = dict(WIRE_ROLES.items())
    if word not in roles:
        raise typer.BadParameter(f"must be {' or '.join(roles)}, got {word!r}", param_hint="ROLE")
    return roles[word]


def _wait(stub: cluster_pb2_grpc.ClusterStub, worker_id: str, timeout_s: float) -> str:
    """The id of the worker that `worker_id` has become, once it is ready."""
    from legato.protos import cluster_pb2, common_pb2

    deadline_s, told = time.monotonic() + timeout_s, ""
    while True:
        now = stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        workers = [worker for pool in now.pools for worker in pool.workers]
        state = next((_state(w) for w in workers if w.worker_id == worker_id), "")
        for worker in workers:
            if worker.predecessor == worker_id:
                if worker.phase == common_pb2.WORKER_PHASE_READY:
                    return worker.worker_id
                state = f"{role_name(worker.role)} worker starting"
        if not state:
            notes = "; ".join(f"{role_name(p.role)}: {p.message}" for p in now.pools if p.message)
            raise ServiceError(
                f"{short_id(worker_id)} ended before it had its new role; the pool starts another "
                f"worker instead{f' ({notes})' if notes else ''}"
            )
        if state != told:
            print(state, file=sys.stderr)
            told = state
        if time.monotonic() > deadline_s:
            raise ServiceError(f"not there within {timeout_s:g} s: {state}")
        time.sleep(POLL_S)


def _state(worker: cluster_pb2.WorkerStatus) -> str:
    load = worker.load
    return f"{short_id(worker.worker_id)} drains: {load.running + load.waiting} sequences are left"
