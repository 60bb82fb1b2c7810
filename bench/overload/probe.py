"""A client in a process of its own: how long a refusal takes, and a call that does nothing.

    python -m legato.bench.overload.probe --address HOST:PORT --deadline-s 2 --rate 10

Asks in turns for an answer and for the server's health, until its standard input is closed; then
prints one JSON line. The health call bounds from below what any answer can take
on this machine now.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato.bench.overload.mix import Mix
from legato.bench.overload.outcome import End, Outcome, ask
from legato.protos import generation_pb2_grpc

SEED = 90_001


async def probe(address: str, deadline_s: float, rate: float) -> dict[str, object]:
    """Latencies in seconds, until standard input ends; `rate`: requests a second."""
    ends = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    # Without a share of batch requests: an interactive one is refused last.
    mix = Mix(SEED, batch_share=0.0)
    outcomes: list[Outcome] = []
    health_s: list[float] = []
    asking: set[asyncio.Task[None]] = set()

    async def one() -> None:
        outcomes.append(await ask(stub, mix.draw(), deadline_s))

    async def idle_call() -> None:
        sent_s = time.monotonic()
        await health.Check(health_pb2.HealthCheckRequest(), timeout=deadline_s)
        health_s.append(time.monotonic() - sent_s)

    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as ch:
        stub = generation_pb2_grpc.GenerationStub(ch)
        health = health_pb2_grpc.HealthStub(ch)
        while not ends.done():
            for work in (one, idle_call):
                task = asyncio.create_task(work())
                asking.add(task)
                task.add_done_callback(asking.discard)
                await asyncio.wait({ends}, timeout=0.5 / rate)
        await asyncio.gather(*asking)
    refused = [o for o in outcomes if o.end is End.REFUSED]
    return {
        "asked": len(outcomes),
        "refusals_s": [round(o.latency_s, 5) for o in refused],
        "router_s": [o.server_s for o in refused],
        "without_hint": sum(o.hint_ms is None for o in refused),
        # Of those that finished: when, on the machine's monotonic clock, and how many tokens.
        "finished": [(o.ended_s, o.num_tokens) for o in outcomes if o.end is End.FINISHED],
        "health_s": [round(seconds, 5) for seconds in health_s],
    }


def main() -> int:
    """Always 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(probe(args.address, args.deadline_s, args.rate))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
