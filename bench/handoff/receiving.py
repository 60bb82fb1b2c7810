"""The receiving process: a decode worker without weights, and the far ends of the limits.

    python -m legato.bench.handoff.receiving --dtype bfloat16 --kv-memory BYTES

Started by `python -m legato.bench.handoff`; prints one line when it is ready, and ends with its
standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from legato.bench.handoff.bare_grpc import SERVICE, STREAM_HANDLERS
from legato.bench.handoff.copies import SharedRing
from legato.bench.handoff.kv_model import loaded_model, worker_config
from legato.bench.handoff.lanes import receive_window
from legato.bench.handoff.rows_digest import rows_digest
from legato.worker.channel import SERVER_OPTIONS
from legato.worker.server import WorkerServer
from legato.worker.spare_memory import keep_little, keep_objects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Requests:
    """What the sending process asks for besides the transfers: JSON there and back."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By method."""
        asked: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "CopyOut": self.copy_out,
            "CpuSeconds": self.cpu_seconds,
            "Digest": self.digest,
            "Window": self.window,
        }
        return {name: _json_handler(answer) for name, answer in asked.items()}

    async def copy_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Copies so many bytes out of the other process's ring, so many times."""
        ring = SharedRing.open(asked["path"], asked["num_slots"], asked["slot_bytes"])
        target = np.full(asked["num_bytes"], 1, np.uint8)

        def copy() -> None:
            for _ in range(asked["times"]):
                ring.copy_out(target)

        await asyncio.to_thread(copy)
        return {}

    async def cpu_seconds(self, _asked: dict[str, Any]) -> dict[str, Any]:
        """Of all threads, since this process started."""
        return {"seconds": time.process_time()}

    async def digest(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Of the rows that have landed for a ticket."""
        node = self._server.node
        ticket = node.tickets.find(asked["epoch"])
        if ticket is None or ticket.lease is None:
            raise ValueError(f"no KV has come for epoch {asked['epoch']}")
        digest = await asyncio.to_thread(
            rows_digest, node.cache, ticket.lease.blocks, asked["num_tokens"]
        )
        return {"digest": digest}

    async def window(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What may be in hand: that of the sending process."""
        receive_window(asked["num_bytes"])
        return {}


def _json_handler(
    answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(message: bytes, _context: object) -> bytes:
        return json.dumps(await answer(json.loads(message))).encode()

    return grpc.unary_unary_rpc_method_handler(handle)


async def _serve(dtype: str, kv_memory_bytes: int) -> None:
    worker = WorkerServer(worker_config("decode", dtype, kv_memory_bytes), loaded_model(dtype))
    address = await worker.start()
    limits = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = STREAM_HANDLERS | Requests(worker).handlers()
    limits.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = limits.add_insecure_port("127.0.0.1:0")
    await limits.start()
    keep_objects()
    print(json.dumps({"address": address, "limits": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the other process closes it, or ends
    await limits.stop(0)
    await worker.stop(0)


def main() -> None:
    """Serves until its standard input ends."""
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.handoff.receiving", description=__doc__
    )
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--kv-memory", type=int, required=True, help="bytes")
    args = parser.parse_args()
    keep_little()  # as a worker does that loads a model
    asyncio.run(_serve(args.dtype, args.kv_memory))


if __name__ == "__main__":
    main()
