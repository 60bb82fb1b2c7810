"""`legato status`: what a service is doing now."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import (
    CALL_TIMEOUT_S,
    AddressOption,
    PortOption,
    choose_address,
    connect,
)
from legato.cluster.cli.status_table import kv_table, status_dict, status_lines, worker_table

if TYPE_CHECKING:
    from legato.protos import cluster_pb2


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
    told = ask_each(choose_address(address, port).split(","))
    answer = next(answer for answer in told.values() if answer is not None)
    if as_json:
        print(json.dumps(status_dict(answer), ensure_ascii=False, indent=2))
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


def ask_each(addresses: list[str]) -> dict[str, cluster_pb2.GetStatusResponse | None]:
    """Of several routers those that do not answer have None, unless none does; at once."""
    with ThreadPoolExecutor(len(addresses)) as threads:
        calls = {address: threads.submit(ask, address) for address in addresses}
    errors = [error for call in calls.values() if (error := call.exception()) is not None]
    if len(errors) == len(calls):
        raise errors[0]
    return {
        address: call.result() if call.exception() is None else None
        for address, call in calls.items()
    }


def ask(address: str) -> cluster_pb2.GetStatusResponse:
    """What one router says; ServiceError where it does not."""
    from legato.protos import cluster_pb2, cluster_pb2_grpc

    with connect(address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
