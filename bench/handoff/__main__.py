"""The KV hand-off against the machine's limits: one JSON line, and a table on stderr.

    python -m legato.bench.handoff

Three parts. `rates`: a prompt's KV, in real pools and with real tickets, from one process to
another on each lane; in the same rounds the same bytes in bare gRPC messages of the same size with
the same window, plain copies by one thread, and copies into and out of shared memory by two
processes. `interference`: 8 short hand-offs at once, alone and beside long ones. `exposed`: a
service with a real model; what the gap between the first and the second token is beyond a decode
step, over the prefill's model time. --sweep tries other sizes of chunk and window instead, a JSON
line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

from legato.bench.handoff.exposed import PROMPT_TOKENS, measure_exposed
from legato.bench.handoff.interference import LONG_TOKENS, NUM_SHORT, SHORT_TOKENS, InterferenceRun
from legato.bench.handoff.kv_model import CONTEXT_LENGTH
from legato.bench.handoff.lanes import LANES
from legato.bench.handoff.rates import (
    BARE_GRPC,
    MEMCPY,
    SHARED_MEMCPY,
    RatesRun,
    WrongRowsError,
)
from legato.bench.handoff.sweep import sweep
from legato.bench.handoff.tables import (
    exposed_table,
    interference_table,
    rates_table,
    sweep_row,
)
from legato.bench.handoff.two_workers import TwoWorkers
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.spare_memory import keep_little, keep_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("rates", "interference", "exposed")
DTYPES = ("bfloat16", "float32")


def main(arguments: Sequence[str] | None = None) -> int:
    """2 with a message where something given is wrong or nothing could be measured; 1 where rows
    came out wrong.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if not 1 <= args.tokens < CONTEXT_LENGTH:
        parser.error(f"--tokens must be in [1, {CONTEXT_LENGTH}), got {args.tokens}")
    try:
        if args.sweep:
            asyncio.run(_sweep(args))
        else:
            print(json.dumps(asyncio.run(_measure(args))))
    except (ValueError, RuntimeError, HandoffError) as error:
        print(f"legato.bench.handoff: {error}", file=sys.stderr)
        return 2
    except WrongRowsError as error:
        print(f"legato.bench.handoff: WRONG: {error}", file=sys.stderr)
        return 1
    return 0


async def _measure(args: argparse.Namespace) -> dict[str, object]:
    parts = args.part or PARTS
    result: dict[str, object] = {"rounds": args.rounds, "load_average": os.getloadavg()[0]}
    for dtype in args.dtype or DTYPES:
        if "rates" not in parts and "interference" not in parts:
            break
        async with TwoWorkers.running(dtype, _num_tokens(args.tokens)) as workers:
            figures: dict[str, object] = {}
            if "rates" in parts:
                limits = [BARE_GRPC, MEMCPY, SHARED_MEMCPY]
                rates = await RatesRun(workers, args.tokens).measure(args.rounds, limits)
                figures["rates"] = rates.as_json()
                _say(rates_table(rates))
            if "interference" in parts:
                runs = [await InterferenceRun(workers, x).measure(args.rounds) for x in LANES]
                figures["interference"] = [run.as_json() for run in runs]
                _say(interference_table(runs, dtype))
            result[dtype] = figures
    if "exposed" in parts:
        worker_arguments = ["--dtype", args.model_dtype]
        if args.threads is not None:
            worker_arguments += ["--threads", str(args.threads)]
        lengths = args.prompt_tokens or PROMPT_TOKENS
        exposed = await measure_exposed(args.model, args.rounds, lengths, worker_arguments)
        result["exposed"] = [figures.as_json() for figures in exposed]
        _say(exposed_table(exposed))
    return result


async def _sweep(args: argparse.Namespace) -> None:
    for dtype in args.dtype or DTYPES[:1]:
        async with TwoWorkers.running(dtype, _num_tokens(args.tokens)) as workers:
            async for rates in sweep(workers, args.tokens, args.rounds):
                print(json.dumps(rates.as_json()), flush=True)
                _say(sweep_row(rates))


def _num_tokens(tokens: int) -> int:
    """Room for what is there at once: a ticket is given back a moment after its call has ended."""
    short = 2 * NUM_SHORT * (SHORT_TOKENS + 16)
    return max(3 * tokens, 3 * LONG_TOKENS + short) + 64


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.handoff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="of each part; default: %(default)s")
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="of the KV that is moved; default: both"
    )
    parser.add_argument(
        "--tokens", type=int, default=4000, help="of the prompt of `rates`; default: %(default)s"
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--model", default="demo", help="of `exposed`")
    parser.add_argument("--model-dtype", default="auto", help="of `exposed`")
    parser.add_argument("--threads", type=int, default=None, help="of each worker of `exposed`")
    parser.add_argument(
        "--prompt-tokens", type=int, action="append", help="of `exposed`; default: 512, 1024, 2048"
    )
    return parser


if __name__ == "__main__":
    keep_little()  # as a worker process does, which this one stands for
    keep_objects()
    sys.exit(main())
