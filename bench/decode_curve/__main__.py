"""The decode curve: tokens/s until the KV pool is full, and its occupancy under overload.

    python -m legato.bench.decode_curve --out docs

On the real engine without services: scheduler, model and sampler in one thread. First, decode
tokens/s against the number of requests offered, beside the machine's limits and the batch size at
which the pool must be full by arithmetic. Then one trace of chats that does not fit, under
`reserve` and under `expected` at several risks: mean KV occupancy while requests wait, decode
rate, preemptions; all answers must be the same. JSON lines on stdout; tables and progress on
stderr; --out writes decode-curve.md and decode-curve.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from legato.bench.decode_curve.batch_sizes import BatchSizes
from legato.bench.decode_curve.capacity_engine import CapacityEngine
from legato.bench.decode_curve.overload import AnswersDifferError, Overload
from legato.bench.decode_curve.page import (
    NAME,
    Setting,
    TraceFigures,
    curve_table,
    overload_table,
    page,
)
from legato.bench.decode_curve.plot import check_matplotlib, draw
from legato.bench.decode_curve.trace import chats
from legato.cluster.text.model_text import ModelText
from legato.worker.byte_size import parse_byte_size
from legato.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from legato.bench.decode_curve.batch_sizes import Turn
    from legato.bench.decode_curve.trace import Request


def main(arguments: Sequence[str] | None = None) -> int:
    """2 with a message where something given is wrong; 1 where answers are not the same."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.rounds is None:
        args.rounds = 1 if args.quick else BatchSizes.num_rounds
    if args.risk is None:
        args.risk = [WorkerConfig.admission_risk] if args.quick else Overload.risks
    for name in ("threads", "rounds", "requests", "max_tokens", "warm_up_answers"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least 1, got {getattr(args, name)}")
    try:
        if args.out is not None and not args.out.is_dir():
            raise ValueError(f"--out {args.out}: no such folder")
        if args.out is not None and not args.no_plot:
            check_matplotlib()
        _measure(args)
    except ValueError as error:
        print(f"legato.bench.decode_curve: {error}", file=sys.stderr)
        return 2
    except AnswersDifferError as error:
        print(f"legato.bench.decode_curve: WRONG: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(args: argparse.Namespace) -> None:
    sizes, overload = BatchSizes(num_rounds=args.rounds), Overload()
    overload = replace(overload, warm_up_answers=args.warm_up_answers, risks=tuple(args.risk))
    if args.quick:
        sizes = replace(sizes, prompt_tokens=48, max_tokens=17, num_steps=20)
    overload.rules()  # refuses a wrong risk before anything is loaded
    engine = CapacityEngine(
        WorkerConfig(
            model=args.model,
            role="decode",
            device=args.device,
            dtype=args.dtype,
            weights=args.weights,
            kv_cache=args.kv_cache,
            kv_memory_bytes=parse_byte_size(args.kv_memory, "--kv-memory"),
            block_size=args.block_size,
            num_threads=args.threads,
        )
    )
    bend = sizes.bend(engine)
    requests = chats(ModelText.load(engine.source), args.requests, args.max_tokens, args.seed)
    setting = Setting(
        model=args.model,
        weights=engine.weights,
        dtype=str(engine.dtype).removeprefix("torch."),
        kv_cache=str(engine.cache.shape.dtype).removeprefix("torch."),
        device=str(engine.device),
        num_threads=args.threads,
        block_size=args.block_size,
        quick=args.quick,
    )
    _print_line("setting", asdict(setting) | {"bend": asdict(bend)})

    started_s = time.monotonic()

    def note(number: int, turn: Turn) -> None:
        _print_line("turn", asdict(turn))
        rate = f"{turn.offered} requests, {turn.tokens_per_s:.0f} tokens/s"
        _say(f"curve, round {number + 1} of {sizes.num_rounds}: {rate}")

    points = sizes.measure(engine, args.threads, note)
    for point in points:
        _print_line("point", asdict(point))
    rows, answers = overload.measure(engine, requests, _say)
    trace = _trace_figures(requests, answers, args.max_tokens, args.seed)
    _print_line("trace", asdict(trace))
    for row in rows:
        _print_line("overload", asdict(row))
    _say(f"took {time.monotonic() - started_s:.0f} s\n")
    _say(f"the pool is full at {bend.batch_size} sequences, by arithmetic\n")
    _say(f"{curve_table(points)}\n\n{overload_table(rows)}")

    if args.out is not None:
        picture = None if args.no_plot else f"{NAME}.svg"
        if picture is not None:
            draw(args.out / picture, bend, points, rows)
        text = page(setting, sizes, bend, points, overload, trace, rows, picture)
        (args.out / f"{NAME}.md").write_text(text, encoding="utf-8")


def _trace_figures(
    requests: Sequence[Request], answers: Mapping[int, list[int]], max_tokens: int, seed: int
) -> TraceFigures:
    ends = [answers[r.number][-1] in r.eos_token_ids for r in requests]
    return TraceFigures(
        num_requests=len(requests),
        prompt_tokens=_spread([len(request.prompt) for request in requests]),
        answer_tokens=_spread([len(answer) for answer in answers.values()]),
        max_tokens=max_tokens,
        cut_off=ends.count(False),
        seed=seed,
    )


def _spread(lengths: Sequence[int]) -> tuple[int, int, int]:
    return min(lengths), round(statistics.median(lengths)), max(lengths)


def _print_line(kind: str, fields: dict[str, object]) -> None:
    print(json.dumps({kind: fields}), flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.decode_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="a folder, a .gguf file, a hub id or demo")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16", help="as of legato serve")
    parser.add_argument("--weights", default="auto", help="as of legato serve")
    parser.add_argument("--kv-cache", default="auto", help="as of legato serve")
    parser.add_argument("--kv-memory", default="96MiB", help="small, so that it is full soon")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="of the curve; default: 3, quick: 1")
    parser.add_argument("--requests", type=int, default=128, help="of the overload")
    parser.add_argument("--max-tokens", type=int, default=256, help="of their answers")
    parser.add_argument("--warm-up-answers", type=int, default=32, help="that are not measured")
    parser.add_argument(
        "--risk",
        type=float,
        action="append",
        help="of expected admission; may be repeated; default: several, "
        "quick: that of legato serve",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short turns: to try it, not to quote")
    parser.add_argument("--out", type=Path, default=None, help="folder for page and plot")
    parser.add_argument("--no-plot", action="store_true", help="without matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
