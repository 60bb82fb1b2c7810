"""What tokens, secrets and TLS cost, with the engine's time taken out: one JSON line.

    python -m legato.bench.router_overhead.access

Routers that differ in nothing else, before fake engines, are asked in turn: `token`: clients show
one; `secret`: the engine asks the router for one; `tls`: clients and router; `all`: these three,
and TLS between router and engine. `unary`: a call after the other; `calls`: short streams, many at
once; `tokens`: long ones. Figures are ratios to `plain`, within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from legato.bench.ready_process import ready_process
from legato.bench.router_overhead.load import LoadRun, Pace
from legato.cluster.client_access import ClientAccess, ClientTls
from legato.cluster.dev_certs import make_certs
from legato.protos import generation_pb2, generation_pb2_grpc
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = "legato.bench.router_overhead"
TOKEN, SECRET = "token-of-the-benchmark", "secret-of-the-benchmark"
SHORT_TOKENS = 2


@dataclass(frozen=True)
class Way:
    """What is on."""

    token: bool = False
    tls: bool = False
    secret: bool = False
    inner_tls: bool = False


WAYS = {
    "plain": Way(),
    "token": Way(token=True),
    "secret": Way(secret=True),
    "tls": Way(tls=True),
    "all": Way(token=True, tls=True, secret=True, inner_tls=True),
}
KINDS = ("unary", "calls", "tokens")


class Target:
    """One router, asked in three ways."""

    def __init__(self, address: str, access: ClientAccess, args: argparse.Namespace) -> None:
        self._args = args
        self._channel = access.aio_channel(address, CHANNEL_OPTIONS)
        self._long = LoadRun(address, args.streams, args.tokens, access=access)
        self._short = LoadRun(address, args.streams, SHORT_TOKENS, access=access)

    async def close(self) -> None:
        """Ends the connections."""
        await self._channel.close()
        await self._long.close()
        await self._short.close()

    async def rates(self, run: int) -> dict[str, float]:
        """Each a second."""
        args, full = self._args, Pace(0.0)
        stub: Any = generation_pb2_grpc.GenerationStub(self._channel)
        began_s = time.monotonic()
        for _ in range(args.calls):
            await stub.GetModel(generation_pb2.GetModelRequest(), timeout=10)
        unary_s, began_s = time.monotonic() - began_s, time.monotonic()
        for number in range(args.bursts):
            await self._short.arrivals_s(run * 1000 + number, full)
        calls_s, began_s = time.monotonic() - began_s, time.monotonic()
        await self._long.arrivals_s(run * 1000 + args.bursts, full)
        tokens_s = time.monotonic() - began_s
        return {
            "unary": args.calls / unary_s,
            "calls": args.bursts * args.streams / calls_s,
            "tokens": args.streams * args.tokens / tokens_s,
        }


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="legato-bench-")))
        certs = folder / "certs"
        make_certs(certs)
        (folder / "tokens").write_text(TOKEN)
        targets = {}
        for name, way in WAYS.items():
            inner = ["--certs", str(certs)] if way.inner_tls else []
            inner += ["--secret", SECRET] if way.secret else []
            engine = await stack.enter_async_context(
                ready_process(
                    f"{HERE}.fake_engine",
                    *("--times", str(folder / name), "--streams", str(args.streams)),
                    *("--tokens", str(args.tokens), *inner),
                )
            )
            outer = ["--public-certs", str(certs)] if way.tls else []
            outer += ["--token-file", str(folder / "tokens")] if way.token else []
            router = await stack.enter_async_context(
                ready_process(
                    f"{HERE}.router_process",
                    *("--model", str(resolve_model(args.model)), "--workers", json.dumps(engine)),
                    *(*inner, *outer),
                )
            )
            stem = f"{certs}/client"
            tls = ClientTls(f"{certs}/ca.pem", f"{stem}.pem", f"{stem}.key") if way.tls else None
            access = ClientAccess(TOKEN if way.token else None, tls)
            targets[name] = Target(router["address"], access, args)
            stack.push_async_callback(targets[name].close)
        for number in range(-1, args.rounds):  # the first one warms up and is not counted
            for name, target in targets.items():
                rates = await target.rates(number + 2)
                if number >= 0:
                    rounds[name].append(rates)
    return _result(args, rounds)


def _result(args: argparse.Namespace, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "plain": {kind: round(median(r[kind] for r in rounds["plain"])) for kind in KINDS},
    }
    for name in WAYS:
        ratios = {
            kind: median(
                own[kind] / plain[kind]
                for own, plain in zip(rounds[name], rounds["plain"], strict=True)
            )
            for kind in KINDS
        }
        result[name] = result.get(name, {}) | {f"{k}_ratio": round(r, 3) for k, r in ratios.items()}
        cells = [f"{kind} {ratio:.2f}" for kind, ratio in ratios.items()]
        print(f"{name:>8}  {'  '.join(cells)}", file=sys.stderr)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """2 with a message where something given is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each long stream")
    parser.add_argument("--calls", type=int, default=200, help="one after the other, a round")
    parser.add_argument("--bursts", type=int, default=4, help="of short streams, a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="demo", help="whose tokenizer makes the text")
    args = parser.parse_args(arguments)
    for name in ("streams", "calls", "bursts", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.tokens < SHORT_TOKENS:
        parser.error(f"--tokens must be at least {SHORT_TOKENS}, got {args.tokens}")
    try:
        print(json.dumps(asyncio.run(_measure(args))))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{HERE}.access: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
