"""plan_check: what a plan predicts of a prefill and a decode worker, beside what a load measures.

    python -m legato.bench.plan_check --profile profile.json --seconds 60

Starts the pair that was profiled, sends it open loads at shares of what it can serve, and closed
ones, and prints a JSON line for each: TTFT, ITL and whole answers as closed forms and as the
simulation of the same requests predict them, and as they were measured. The last line has the
median errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import grpc

from legato.bench.handoff.service import running_service, until_ready
from legato.bench.load.report import Slo, report
from legato.bench.load.run import run_load
from legato.bench.plan_workloads import WORKLOADS, load_of, predict
from legato.bench.profiling.settings import ProfiledSettings
from legato.cluster.client_access import NOTHING_SHOWN
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.cluster.text.model_text import ModelText
from legato.plan.basis import profile_basis
from legato.plan.prediction import PERCENTS, Slowdown
from legato.plan.profile import read_profile
from legato.plan.simulation.arrivals import Arrival
from legato.plan.simulation.setup import SimulatedService
from legato.plan.simulation.simulate import Replayed, replay
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.workload import LoadWorkload
    from legato.bench.plan_workloads import CheckedWorkload
    from legato.plan.basis import Basis
    from legato.plan.profile import Profile

FIGURES = ("ttft_s", "itl_s", "e2e_s")
_CLOSED_REQUESTS = 300  # of a closed load, that are simulated
_TIMEOUT_S = 300.0

Figures = dict[str, dict[str, float]]  # by name, by percent


def simulated(basis: Basis, workload: LoadWorkload) -> Figures:
    """The same requests, at the same times where they have any. Not where an event loop runs."""
    service = SimulatedService(
        times=basis.times,
        size=basis.size,
        kv_bytes_per_token=basis.kv_bytes_per_token,
        link_bytes_per_s=basis.link_bytes_per_s,
        num_prefill=1,
        num_decode=1,
        slowdown=basis.slowdown or Slowdown(),
        mixes_prompts=basis.worker.device != "cuda",
    )
    count = None if workload.is_open else _CLOSED_REQUESTS
    arrivals = [
        Arrival(p.number, p.at_s or 0.0, p.input_tokens, p.output_tokens)
        for p in islice(workload.requests(), count)
    ]
    found = replay(service, arrivals, workload.concurrency) if arrivals else Replayed({}, {}, {})
    return {name: _by_percent(getattr(found, name)) for name in FIGURES}


def foretold(
    basis: Basis, checked: CheckedWorkload, seconds: float, seed: int
) -> tuple[LoadWorkload, dict[str, Figures]]:
    """The load, and what each way says of it; closed forms say nothing of closed loads, and nothing
    of whole answers.
    """
    rate: float | None = None
    ways: dict[str, Figures] = {}
    if checked.share is not None:
        rate, found = predict(basis, checked.inputs, checked.outputs, checked.share)
        ways["closed_forms"] = {
            "ttft_s": _by_percent(found.ttft_s),
            "itl_s": _by_percent(found.itl_s),
        }
    workload = load_of(checked, rate, seconds, seed)
    ways["simulated"] = simulated(basis, workload)
    return workload, ways


async def check(
    profile: Profile, loads: Sequence[tuple[LoadWorkload, dict[str, Figures]]]
) -> list[dict[str, Any]]:
    """A dictionary for each load.

    Raises:
        RuntimeError: a worker did not start.
    """
    worker = profile.worker
    settings = ProfiledSettings(
        worker.model,
        worker.device,
        worker.dtype,
        worker.weights,
        worker.kv_cache,
        worker.kv_memory_bytes,
        worker.num_threads,
        worker.max_batch_size,
    )
    text = ModelText.load(resolve_model(worker.model))
    results = []
    async with (
        running_service(worker.model, text, settings.arguments(), RouterOptions(port=0)) as address,
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        await until_ready(channel)
        for workload, ways in loads:
            samples = await run_load(
                workload, [address], NOTHING_SHOWN, timeout_s=_TIMEOUT_S, num_warmup=2
            )
            measured: dict[str, Any] = report(samples, Slo())
            result = _described(workload)
            result |= {"requests": measured["requests"], "failed": measured["failed"], **ways}
            result["measured"] = {
                name: {f"p{p:g}": round(measured[name][f"p{p:g}"], 4) for p in PERCENTS}
                for name in FIGURES
                if measured[name] is not None
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def median_errors(results: Sequence[dict[str, Any]], way: str) -> Figures:
    """Of each figure, over the loads: the median of how far the prediction is from the measured."""
    errors: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for name, by_percent in result.get(way, {}).items():
            for percent, value in by_percent.items():
                measured = result["measured"].get(name, {}).get(percent)
                if measured:
                    errors.setdefault(name, {}).setdefault(percent, []).append(
                        abs(value / measured - 1)
                    )
    return {
        name: {percent: round(median(values), 4) for percent, values in of.items()}
        for name, of in errors.items()
    }


def _described(workload: LoadWorkload) -> dict[str, Any]:
    inputs, outputs = workload.inputs, workload.outputs
    assert inputs is not None
    assert outputs is not None
    load: dict[str, Any] = {
        "input": f"{inputs.least}..{inputs.most}",
        "output": f"{outputs.least}..{outputs.most}",
    }
    if workload.rate_per_s is None:
        return load | {"concurrency": workload.concurrency}
    return load | {"rate": round(workload.rate_per_s, 3)}


def _by_percent(values: dict[float, float]) -> dict[str, float]:
    return {f"p{p:g}": round(values[p], 4) for p in PERCENTS if p in values}


def main() -> int:
    """1 where a request failed: such figures say nothing."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.plan_check")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the loads")
    parser.add_argument("--first", type=int, default=len(WORKLOADS), help="so many of the loads")
    args = parser.parse_args()
    if not 1 <= args.first <= len(WORKLOADS):
        parser.error(f"--first must be in [1, {len(WORKLOADS)}], got {args.first}")
    try:
        profile = read_profile(args.profile)
        basis = profile_basis(profile, None, None)
        loads = [
            foretold(basis, checked, args.seconds, seed)
            for seed, checked in enumerate(WORKLOADS[: args.first])
        ]
        results = asyncio.run(check(profile, loads))
    except (ValueError, RuntimeError, TimeoutError, grpc.RpcError) as error:
        print(f"legato.bench.plan_check: {error}", file=sys.stderr)
        return 2
    errors = {way: median_errors(results, way) for way in ("simulated", "closed_forms")}
    print(json.dumps({"median_errors": errors, "loads": len(results)}))
    return 1 if any(result["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
