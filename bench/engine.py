"""Our bare engine under fixed workloads: one JSON line each, beside the machine's own limits.

    python -m legato.bench.engine --model DIR --dtype bfloat16 --threads 2 --workload single

The bare engine is scheduler, model and sampler in one thread; `legato bench` measures the
service around it. Each figure comes with its fraction of the limit: decode, the bytes that a step
cannot do without over the step's time and the measured read bandwidth; prefill, the operations
over the time and the measured matrix products of the dtype used. A workload runs once to warm
up and then `--repeat` times; the line is that of the run with the middle wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from legato.bench.bare_engine import BareEngine
from legato.bench.limits import best_of, measure_limits
from legato.bench.workload import WORKLOADS, summarise
from legato.worker.byte_size import parse_byte_size
from legato.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.bare_engine import Run
    from legato.bench.limits import Limits
    from legato.bench.workload import Workload

DEFAULT_WORKLOADS = ("single", "batch8", "batch32", "prompt1024", "prompt2048")


@dataclass(frozen=True)
class Fractions:
    """How near a run came to the limits: the best that was measured, not the median.

    None where the run had no such step, or where there is no such limit.
    """

    decode_of_bandwidth: float | None
    prefill_of_matmul: float | None


def fractions(
    decode_bytes_per_s: float | None,
    prefill_ops_per_s: float | None,
    limits: Limits,
    dtype_name: str,
) -> Fractions:
    """`dtype_name` is the products': "float32", "bfloat16", or of quantised weights "int8"."""
    peak = limits.matmul_ops_per_s.get(dtype_name)
    return Fractions(
        decode_of_bandwidth=decode_bytes_per_s
        and decode_bytes_per_s / limits.read_bytes_per_s.best,
        prefill_of_matmul=prefill_ops_per_s / peak.best if prefill_ops_per_s and peak else None,
    )


def worker_config(settings: dict[str, object]) -> WorkerConfig:
    """A WorkerConfig of those settings that are not None.

    Raises:
        ValueError: WorkerConfig has no such field, or refuses a value.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    known = {field.name for field in dataclasses.fields(WorkerConfig)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"this engine has no setting {', '.join(unknown)}")
    return WorkerConfig(**given)  # type: ignore[arg-type]  # the values came from argparse


def _runs(engine: BareEngine, workload: Workload, count: int) -> Run:
    """Runs once to warm up and `count` times; the one with the median wall time."""
    vocab_size = engine.model.config.vocab_size
    runs = [
        engine.run(workload.prompts(vocab_size, run), workload.num_at_once, workload.max_tokens)
        for run in range(count + 1)
    ]
    return sorted(runs[1:], key=lambda run: run.wall_s)[(count - 1) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the lines; 2 with a message where the model, a setting or a workload is wrong."""
    parser = _parser()
    args = parser.parse_args(arguments)
    for name in ("threads", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        config = worker_config(
            {
                "model": args.model,
                "role": "prefill",
                "device": args.device,
                "dtype": args.dtype,
                "weights": args.weights,
                "kv_cache": args.kv_cache,
                "kv_memory_bytes": parse_byte_size(args.kv_memory, "--kv-memory"),
                "block_size": args.block_size,
                "prefill_chunk_tokens": args.prefill_chunk_tokens,
                "num_threads": args.threads,
            }
        )
        engine = BareEngine(config)
        for name in args.workload or DEFAULT_WORKLOADS:
            workload = WORKLOADS[name]
            # On both sides of each workload: they change within minutes.
            before = measure_limits(args.threads, engine.device)
            run = _runs(engine, workload, args.repeat)
            after = measure_limits(args.threads, engine.device)
            limits = best_of(before, after)
            dtype_name = str(engine.dtype).removeprefix("torch.")
            line = {
                "workload": asdict(workload),
                "config": asdict(config) | {"dtype": dtype_name},
                "figures": asdict(summarise(workload, run.requests)),
                "decode_bytes_per_s": run.decode_bytes_per_s,
                "prefill_ops_per_s": run.prefill_ops_per_s,
                "fractions": asdict(
                    fractions(
                        run.decode_bytes_per_s, run.prefill_ops_per_s, limits, engine.product_dtype
                    )
                ),
                "cost": asdict(engine.cost),
                "limits": asdict(limits),
                "limits_before_and_after": [asdict(before), asdict(after)],
            }
            print(json.dumps(line), flush=True)
    except ValueError as error:
        print(f"legato.bench.engine: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m legato.bench.engine", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a .gguf file, a hub id or demo")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="as of legato serve")
    parser.add_argument("--weights", default=None, help="how weights are held; default: in dtype")
    parser.add_argument("--kv-cache", default=None, help="how KV is held; default: in dtype")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--workload",
        action="append",
        choices=sorted(WORKLOADS),
        help=f"may be given several times; default: {', '.join(DEFAULT_WORKLOADS)}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
