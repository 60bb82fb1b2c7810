"""The router's process: the production router before the fake engine, without Ray.

    python -m legato.bench.router_overhead.router_process --model PATH --workers JSON

Started by `python -m legato.bench.router_overhead`; prints one line when it is ready, and ends with
its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from legato.bench.router_overhead.inner_access import add_options, inner_access, tls_files
from legato.cluster.config import RouterOptions
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.role_change import UnknownWorkerError
from legato.cluster.router import Router
from legato.cluster.text.model_text import ModelText
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad

READY_TIMEOUT_S = 30.0


class NoControl:
    """The workers are those given, for ever."""

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """None is told."""
        return []

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """Nothing changes."""
        return targets

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """There are no others."""
        raise UnknownWorkerError(f"no worker is to change its role: {worker_id} to {role}")

    async def drain_worker(self, worker_id: str) -> str:
        """There are no others."""
        raise UnknownWorkerError(f"no worker is to be drained: {worker_id}")

    async def drain_node(self, node: str) -> list[str]:
        """There are no nodes."""
        raise UnknownWorkerError(f"no node is to be drained: {node}")

    async def shutdown(self, drain_timeout_s: float) -> None:
        """The benchmark ends the process."""

    async def report_load(self, load: RouterLoad) -> None:
        """Nobody scales."""

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        """There is none."""
        return cluster_pb2.AutoscalerStatus()

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """A benchmark that loses a worker has measured nothing."""
        raise RuntimeError(f"worker {worker_id} was lost: {reason}")


async def _serve(args: argparse.Namespace) -> None:
    router = Router(
        RouterOptions(
            port=0,
            http_port=0,
            local_prefill_tokens=0,
            tls=tls_files(args.public_certs, "service"),
            token_file=args.token_file,
            access=inner_access(args.certs, "service", args.secret),
        ),
        ModelText.load(args.model),
        NoControl(),
        model_name="fake",
        version="0",
        owner_pid=os.getpid(),
        owner_host=socket.gethostname(),
    )
    address = await router.start()
    workers: dict[Role, dict[str, str]] = json.loads(args.workers)
    await router.set_workers(
        [WorkerEndpoint(w["worker_id"], role, w["address"]) for role, w in workers.items()]
    )
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not router.ready:  # a moment at the start
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the router is not ready: {router.missing()}")
        await asyncio.sleep(0.01)
    gc.freeze()
    print(
        json.dumps({"address": address, "http": router.http_address, "pid": os.getpid()}),
        flush=True,
    )
    await asyncio.to_thread(sys.stdin.buffer.read)
    await router.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workers", required=True)
    parser.add_argument("--public-certs", help="as --certs, of the public port")
    parser.add_argument("--token-file", help="what clients must show")
    add_options(parser)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
