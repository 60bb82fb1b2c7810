"""simulate: one service under one traffic, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.plan.prediction import PERCENTS
from legato.plan.simulation.arrivals import draw_arrivals
from legato.plan.simulation.cluster import SimulatedCluster
from legato.plan.simulation.result import make_result
from legato.plan.simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.simulation.arrivals import Arrival
    from legato.plan.simulation.result import Result
    from legato.plan.simulation.setup import Run, SimulatedService
    from legato.plan.targets import Targets
    from legato.plan.traffic import Traffic


def simulate(
    service: SimulatedService,
    traffic: Traffic,
    run: Run,
    targets: Targets | None = None,
    *,
    stops_early: bool = False,
) -> Result:
    """What the clients feel, and how busy everything is. Not to be called where an event loop runs.

    `stops_early`: as soon as so many first tokens were late that the TTFT target is missed clearly;
    then only that is to be taken from the result.

    Raises:
        ValueError: the traffic counts on cached prefixes, which simulated prompts do not have.
    """
    if traffic.prefix_share:
        raise ValueError("prefixes in common are not simulated: leave prefix_share at 0")
    arrivals = draw_arrivals(traffic, run.num_requests, run.seed)

    async def main() -> Result:
        cluster = SimulatedCluster(
            service, arrivals, run, gives_up_by=targets if stops_early else None
        )
        await cluster.run()
        return make_result(cluster, run, traffic, targets)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


@dataclass(frozen=True)
class Replayed:
    """Percentiles over all requests, in seconds."""

    ttft_s: dict[float, float]
    itl_s: dict[float, float]
    e2e_s: dict[float, float]


def replay(
    service: SimulatedService, arrivals: Sequence[Arrival], concurrency: int | None = None
) -> Replayed:
    """Exactly these requests, from an empty service: at their times, or, with `concurrency`, so
    many at a time. Not to be called where an event loop runs.
    """

    async def main() -> Replayed:
        cluster = SimulatedCluster(service, arrivals, None, concurrency=concurrency)
        await cluster.run()
        measures = cluster.measures
        return Replayed(
            {p: measures.ttft(p).value for p in PERCENTS},
            {p: measures.itl(p).value for p in PERCENTS},
            {p: measures.e2e(p).value for p in PERCENTS},
        )

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
