"""Command: how a service behaves from 2 to 256 workers, and what limits it beyond: docs/scaling.md.

python -m legato.plan.simulation.scaling --out docs/scaling.md
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cluster.policies import Demand
from legato.plan.datasheets import DATASHEETS
from legato.plan.lengths import Lengths
from legato.plan.model_cost import ModelCost
from legato.plan.prediction import Predictor, WorkerSize
from legato.plan.simulation.arrivals import draw_arrivals
from legato.plan.simulation.cluster import SimulatedCluster
from legato.plan.simulation.scaling_page import scaling_page
from legato.plan.simulation.setup import Run, SimulatedService
from legato.plan.simulation.simulate import simulate
from legato.plan.simulation.virtual_loop import VirtualLoop
from legato.plan.step_times import RooflineTimes
from legato.plan.targets import Targets
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.simulation.result import Result

GPU, LINK_BYTES_PER_S = "H100", 100e9 / 8
# 8 billion weights of 16 bit, 32 layers, eight KV heads of 128.
EIGHT_B = ModelCost(16_000_000_000, 131_072, 7_500_000_000, 500_000_000, 131_072, (None,) * 32)
TIMES = RooflineTimes.of(EIGHT_B, DATASHEETS[GPU], LINK_BYTES_PER_S)
PROMPTS, ANSWERS = "lognormal:800:0.8:8000", "lognormal:60:0.7:500"
SIZE = WorkerSize(kv_rows=400_000, max_batch_size=64)
PREFILL_SHARE = 3 / 8  # of the workers
BUSY = 0.7  # of what prefill can do
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
ROUTERS = (1, 2, 4, 8)
ROUTED_WORKERS = 64  # in the table of routers
_PLACED, _ROUNDS = 100, 5


@dataclass(frozen=True)
class Row:
    """One size of a service. `*_cpu_s` were measured here, the rest is simulated."""

    num_prefill: int
    num_decode: int
    num_routers: int
    rate_per_s: float
    result: Result
    simulation_cpu_s: float
    placing_cpu_s: float  # of the router, a request


def scaled(num_workers: int, num_routers: int = 1) -> tuple[SimulatedService, Traffic]:
    """A service of so many workers, and a traffic that keeps its prefill workers BUSY."""
    num_prefill = max(1, round(PREFILL_SHARE * num_workers))
    alone = Traffic.of(1.0, Lengths.parse(PROMPTS), Lengths.parse(ANSWERS))
    service_s = Predictor(TIMES, alone, SIZE, Targets(1e5, 1e5)).service_mean_s
    service = SimulatedService(
        times=TIMES,
        size=SIZE,
        kv_bytes_per_token=EIGHT_B.kv_bytes_per_token,
        link_bytes_per_s=LINK_BYTES_PER_S,
        num_prefill=num_prefill,
        num_decode=num_workers - num_prefill,
        num_routers=num_routers,
        mixes_prompts=False,
    )
    return service, replace(alone, rate_per_s=BUSY * num_prefill / service_s)


def placing_cpu_s(service: SimulatedService, traffic: Traffic) -> float:
    """Seconds of a processor in which a router finds workers for one request, all idle: the best of
    some rounds.
    """
    run = Run()
    arrivals = draw_arrivals(traffic, run.num_requests, run.seed)

    async def main() -> float:
        cluster = SimulatedCluster(service, arrivals, run)
        [router] = await cluster.begin()
        spent_s = []
        for first in range(0, _PLACED * _ROUNDS, _PLACED):
            began_s = time.process_time()
            for arrival in arrivals[first : first + _PLACED]:
                [entry] = router.admission.enter(1)
                rows = arrival.prompt_tokens + arrival.output_tokens - 1
                demand = Demand(arrival.prompt_tokens, rows)
                (await router.admission.place(entry, demand, first=True)).release()
            spent_s.append(time.process_time() - began_s)
        await router.end()
        return min(spent_s) / _PLACED

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def measure(num_workers: int, num_routers: int, run: Run) -> Row:
    """One row."""
    service, traffic = scaled(num_workers, num_routers)
    began_s = time.process_time()
    result = simulate(service, traffic, run)
    return Row(
        service.num_prefill,
        service.num_decode,
        num_routers,
        traffic.rate_per_s,
        result,
        time.process_time() - began_s,
        placing_cpu_s(replace(service, num_routers=1), traffic),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m legato.plan.simulation.scaling")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=WORKERS[-1], help="workers")
    parser.add_argument("--requests", type=int, default=24, help="a worker; at least 2,000 in all")
    args = parser.parse_args(arguments)

    def run(num_workers: int) -> Run:
        return Run(max(2000, args.requests * num_workers))

    rows = []
    for number in (n for n in WORKERS if n <= args.most):
        rows.append(measure(number, 1, run(number)))
        print(f"{number} workers: {rows[-1].simulation_cpu_s:.1f} s", flush=True)
    routed = [
        measure(min(ROUTED_WORKERS, args.most), number, run(ROUTED_WORKERS)) for number in ROUTERS
    ]
    args.out.write_text(scaling_page(rows, routed, platform.machine()))


if __name__ == "__main__":
    main()
