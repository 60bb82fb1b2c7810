"""Command: KV occupancy and preemptions of each admission rule, on one trace, in virtual time."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from legato.bench.simulation.worker import DecodeWorkerSimulation
from legato.bench.simulation.workload import overload
from legato.worker.scheduling.claim import AdmissionMode

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line a rule."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.simulation", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1000, help="of 16 tokens, in the pool")
    parser.add_argument("--requests", type=int, default=600, help="all there at the start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--risk", type=float, action="append", help="of expected admission; may be repeated"
    )
    args = parser.parse_args(arguments)
    for name in ("blocks", "requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    for risk in args.risk or ():
        if not 0 <= risk < 1:
            parser.error(f"--risk must be in [0, 1), got {risk}")
    print(f"{'admission':>14} {'occupancy':>9} {'tokens/step':>11} {'preempted':>9} {'moved':>7}")
    rules = [(AdmissionMode.RESERVE, 0.5)]
    rules += [(AdmissionMode.EXPECTED, risk) for risk in args.risk or (0.1, 0.3, 0.5, 0.6, 0.7)]
    for mode, risk in rules:
        workload = overload(
            args.seed, num_requests=args.requests, num_blocks=args.blocks, mode=mode, risk=risk
        )
        report = DecodeWorkerSimulation(workload, checks=False).run()
        if report.finished < args.requests:
            parser.error(
                f"--blocks {args.blocks} is too small: {report.refused} of {args.requests} "
                f"requests can never fit in {args.blocks * workload.block_size} tokens"
            )
        name = mode.value if mode is AdmissionMode.RESERVE else f"{mode.value} {risk:g}"
        print(
            f"{name:>14} {report.mean_occupancy:>8.1%} {report.tokens / report.steps:>11.1f} "
            f"{report.preemptions:>9} {report.blocks_moved:>7}",
            flush=True,
        )


if __name__ == "__main__":
    main()
