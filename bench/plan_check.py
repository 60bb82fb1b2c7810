"""plan_check: what a plan predicts of a prefill and a decode worker, beside what a load measures.

    python -m legato.bench.plan_check --profile profile.json --seconds 60

Starts the pair that was profiled, sends it open loads at shares of what it can serve, and prints a
JSON line for each: predicted and measured TTFT and ITL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from legato.bench.handoff.service import running_service, until_ready
from legato.bench.load.report import Slo, report
from legato.bench.load.run import run_load
from legato.bench.load.workload import LoadWorkload
from legato.bench.profiling.settings import ProfiledSettings
from legato.cluster.client_access import NOTHING_SHOWN
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.cluster.text.model_text import ModelText
from legato.plan.basis import profile_basis
from legato.plan.lengths import Lengths
from legato.plan.prediction import Predictor
from legato.plan.profile import read_profile
from legato.plan.targets import Targets
from legato.plan.traffic import Traffic
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from legato.plan.basis import Basis
    from legato.plan.prediction import Prediction
    from legato.plan.profile import Profile

# (prompt, answer, share of what the slower pool can serve)
WORKLOADS = (
    ("200..400", "32", 0.3),
    ("200..400", "32", 0.6),
    ("150..300", "64..192", 0.3),
    ("150..300", "64..192", 0.6),
)
PERCENTS = (50.0, 90.0, 99.0)
_ANY = Targets(ttft_s=1e5, itl_s=1e5)  # what is predicted is asked, not whether it will do
_TIMEOUT_S = 300.0


def predict(
    basis: Basis, inputs: Lengths, outputs: Lengths, share: float
) -> tuple[float, Prediction]:
    """The rate that is `share` of what the pair can serve, and what it will be like."""

    def at(rate_per_s: float) -> Prediction | None:
        traffic = Traffic.of(rate_per_s, inputs, outputs)
        made = Predictor(basis.times, traffic, basis.size, _ANY, basis.slowdown)
        return made.predict(1, 1)

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) is None else (middle, high)
    found = at(share * low)
    assert found is not None, "it is less than the pair can serve"
    return share * low, found


async def check(profile: Profile, seconds: float) -> list[dict[str, Any]]:
    """A dictionary for each workload.

    Raises:
        RuntimeError: a worker did not start.
    """
    basis, worker = profile_basis(profile, None, None), profile.worker
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
        for seed, (prompt, answer, share) in enumerate(WORKLOADS):
            inputs, outputs = Lengths.parse(prompt), Lengths.parse(answer)
            rate, found = predict(basis, inputs, outputs, share)
            workload = LoadWorkload(inputs, outputs, rate_per_s=rate, duration_s=seconds, seed=seed)
            samples = await run_load(
                workload, [address], NOTHING_SHOWN, timeout_s=_TIMEOUT_S, num_warmup=2
            )
            measured: dict[str, Any] = report(samples, Slo(), None)
            result = {"input": prompt, "output": answer, "share": share, "rate": round(rate, 3)}
            result |= {"requests": measured["requests"], "failed": measured["failed"]}
            for name in ("ttft_s", "itl_s"):
                predicted: dict[float, float] = getattr(found, name)
                result[name] = {
                    f"p{p:g}": {
                        "predicted": round(predicted[p], 4),
                        "measured": round(measured[name][f"p{p:g}"], 4),
                    }
                    for p in PERCENTS
                    if measured[name] is not None
                }
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def main() -> int:
    """1 where a request failed: such figures say nothing."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.plan_check")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the loads")
    args = parser.parse_args()
    try:
        results = asyncio.run(check(read_profile(args.profile), args.seconds))
    except (ValueError, RuntimeError, TimeoutError, grpc.RpcError) as error:
        print(f"legato.bench.plan_check: {error}", file=sys.stderr)
        return 2
    return 1 if any(result["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
