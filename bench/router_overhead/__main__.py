"""What the router adds to a token's way, with the engine's time taken out: one JSON line.

    python -m legato.bench.router_overhead

A fake engine sends tokens without computing any; the load takes them from the engine itself
(direct), through a bare gRPC relay, through the router, and as events from the router's HTTP
endpoint, in turn, in the same run. `spread`:
each stream has a token every period, evenly spread over it; `together`: all at the same moment, as
after one decode step; `full`: each stream as fast as it goes. Engine, router and load share the
machine's cores: at full speed the figure is that of all three together, for the relay as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from legato.bench.ready_process import ready_process
from legato.bench.router_overhead.load import LoadKind, LoadRun, Pace
from legato.bench.router_overhead.send_times import SendTimes
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = "legato.bench.router_overhead"
WAYS = ("direct", "relay", "router", "http")
GOAL_ADDED_MS, GOAL_TOKENS_S, GOAL_OF_RELAY = 1.0, 3000.0, 0.5
# Tokens that are on their way while streams begin and end share the machine with the beginnings.
EDGE_TOKENS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """2 with a message where something given is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--period", type=float, default=0.05, help="seconds between two tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo", help="whose tokenizer makes the text")
    args = parser.parse_args(arguments)
    for name, least in (("streams", 1), ("tokens", 2 * EDGE_TOKENS + 2), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if not args.period > 0:
        parser.error(f"--period must be above 0, got {args.period}")
    try:
        print(json.dumps(asyncio.run(_measure(args))))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"legato.bench.router_overhead: {error}", file=sys.stderr)
        return 2
    return 0


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, dict[str, list[float]]] = {
        kind: {way: [] for way in WAYS} for kind in ("spread", "together", "full")
    }
    paces = {
        "spread": Pace(args.period),
        "together": Pace(args.period, together=True),
        "full": Pace(0.0),
    }
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="legato-bench-")))
        times_path = folder / "send_times"
        engine = await stack.enter_async_context(
            ready_process(
                f"{HERE}.fake_engine",
                *("--times", str(times_path), "--streams", str(args.streams)),
                *("--tokens", str(args.tokens)),
            )
        )
        relay = await stack.enter_async_context(
            ready_process(f"{HERE}.relay", "--decode", engine["decode"]["address"])
        )
        router = await stack.enter_async_context(
            ready_process(
                f"{HERE}.router_process",
                *("--model", str(resolve_model(args.model)), "--workers", json.dumps(engine)),
            )
        )
        times = SendTimes(times_path, args.streams, args.tokens, create=False)
        addresses = {
            "direct": engine["decode"]["address"],
            "relay": relay["address"],
            "router": router["address"],
            "http": router["http"],
        }
        kinds: dict[str, LoadKind] = {"direct": "decode", "http": "http"}
        loads = {}
        for way in WAYS:
            load_kind = kinds.get(way, "generate")
            loads[way] = LoadRun(addresses[way], args.streams, args.tokens, load_kind)
            stack.push_async_callback(loads[way].close)
        run = 0
        for number in range(-1, args.rounds):  # the first one warms up and is not counted
            for kind, pace in paces.items():
                for way in WAYS:
                    run += 1
                    arrived_s = (await loads[way].arrivals_s(run, pace))[
                        :, EDGE_TOKENS:-EDGE_TOKENS
                    ]
                    sent_s = times.seconds[:, EDGE_TOKENS:-EDGE_TOKENS]
                    if number < 0:
                        continue
                    if kind == "full":
                        seconds = float(arrived_s.max() - sent_s.min())
                        rounds[kind][way].append(arrived_s.size / seconds)
                    else:
                        rounds[kind][way].append(1e3 * float(np.median(arrived_s - sent_s)))
    return _result(args, rounds)


def _result(args: argparse.Namespace, rounds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians over the rounds; differences and ratios are taken within a round."""
    spread, together, full = rounds["spread"], rounds["together"], rounds["full"]

    def added(kind: dict[str, list[float]], way: str) -> float:
        return median(w - d for w, d in zip(kind[way], kind["direct"], strict=True))

    result: dict[str, Any] = {
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "spread_tokens_s": args.streams / args.period,
        "goals": {
            "added_p50_ms": GOAL_ADDED_MS,
            "tokens_s": GOAL_TOKENS_S,
            "of_relay": GOAL_OF_RELAY,
        },
    }
    for way in ("relay", "router", "http"):
        result[way] = {
            "added_p50_ms": round(added(spread, way), 3),
            "added_p50_ms_together": round(added(together, way), 3),
            "full_tokens_s": round(median(full[way])),
        }
    result["direct"] = {
        "p50_ms": round(median(spread["direct"]), 3),
        "p50_ms_together": round(median(together["direct"]), 3),
        "full_tokens_s": round(median(full["direct"])),
    }
    ratios = [router / relay for router, relay in zip(full["router"], full["relay"], strict=True)]
    result["router"]["of_relay"] = round(median(ratios), 3)
    ratios = [http / router for http, router in zip(full["http"], full["router"], strict=True)]
    result["http"]["of_router"] = round(median(ratios), 3)
    _print_table(result)
    return result


def _print_table(result: dict[str, Any]) -> None:
    rows = [("", "added p50, spread", "added p50, together", "tokens/s")]
    rows += [
        (
            way,
            f"{result[way]['added_p50_ms']:.2f} ms",
            f"{result[way]['added_p50_ms_together']:.2f} ms",
            f"{result[way]['full_tokens_s']:,}",
        )
        for way in ("relay", "router", "http")
    ]
    for row in rows:
        print("  ".join(f"{cell:>20}" for cell in row), file=sys.stderr)
    print(
        f"router / relay: {result['router']['of_relay']:.2f} (goal {GOAL_OF_RELAY}); goals: "
        f"{GOAL_ADDED_MS:g} ms spread, {GOAL_TOKENS_S:,.0f} tokens/s; "
        f"HTTP / gRPC: {result['http']['of_router']:.2f}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
