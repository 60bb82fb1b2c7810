"""A service under more load than it can serve: one JSON line of what came of it.

    python -m legato.bench.overload --address 127.0.0.1:50051

Measures the peak first, in a closed loop of so many streams that the service always has enough to
do. Then requests arrive at `--factor` times that rate, by chance and whatever comes back, each with
a deadline: 70 % interactive, 30 % batch. Goodput is what finished within its deadline; refusals are
timed by a client in a process of its own. In the end: how long until a request is served as on an
idle service. A run that sent less than it names is invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from legato.bench.overload.run import NoPeakError, Plan, run


def main() -> int:
    """1 where something is not as it must be, 2 where the run is invalid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="of a service on this machine")
    parser.add_argument("--peak-s", type=float, default=15.0)
    parser.add_argument("--flood-s", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=3.0, help="times the peak")
    parser.add_argument("--streams", type=int, default=32, help="of the closed loop")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in ("peak_s", "flood_s", "factor", "streams"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    plan = Plan(args.address, args.peak_s, args.flood_s, args.factor, args.streams, args.seed)
    report: dict[str, object]
    try:
        report = asyncio.run(run(plan))
    except NoPeakError as error:
        report = {"invalid": [str(error)], "wrong": []}
    print(json.dumps(report))
    for name in ("invalid", "wrong"):
        for sentence in report[name]:  # type: ignore[attr-defined]  # a list of sentences
            print(f"{name}: {sentence}", file=sys.stderr)
    return 2 if report["invalid"] else 1 if report["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
