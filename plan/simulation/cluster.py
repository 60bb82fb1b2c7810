"""SimulatedCluster: the workers, links and routers of one simulated service, and its clients."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from legato.plan.simulation.channel import SimulatedAccess
from legato.plan.simulation.decode_worker import DecodeWorker
from legato.plan.simulation.engine import PoolBusy
from legato.plan.simulation.link import Links
from legato.plan.simulation.measures import Measures
from legato.plan.simulation.prefill_worker import PrefillWorker
from legato.plan.simulation.request import SimulatedRequest
from legato.plan.simulation.router import SimulatedRouter
from legato.plan.simulation.step_table import StepTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.simulation.arrivals import Arrival
    from legato.plan.simulation.setup import Run, SimulatedService

START_S = 1.0  # until all routers know all workers, and requests begin to come


class SimulatedCluster:
    """To be made within a `VirtualLoop`."""

    def __init__(self, service: SimulatedService, run: Run, arrivals: Sequence[Arrival]) -> None:
        self.service = service
        self._arrivals = arrivals
        self._first, self._end = run.first_measured, run.end_measured
        self.measures = Measures(
            START_S + arrivals[self._first].at_s, START_S + arrivals[self._end].at_s
        )
        self.links = Links(service.link_bytes_per_s, self.measures)
        table = StepTable(service.times, random.Random(run.seed))
        computing, decoding = PoolBusy(service.num_prefill), PoolBusy(service.num_decode)
        self.prefill = {
            name: PrefillWorker(name, service, table, self.measures, computing, decoding)
            for name in (f"prefill-{number:04}" for number in range(service.num_prefill))
        }
        self.decode = {
            name: DecodeWorker(name, service, table, self.measures, decoding, computing)
            for name in (f"decode-{number:04}" for number in range(service.num_decode))
        }

    async def run(self) -> None:
        """Until every request that is measured has ended."""
        loop = asyncio.get_running_loop()
        access = SimulatedAccess(
            workers={**self.prefill, **self.decode},
            num_blocks=self.service.num_blocks,
            block_size=self.service.size.block_size,
        )
        routers = [
            SimulatedRouter(self.service.options, access) for _ in range(self.service.num_routers)
        ]
        for router in routers:
            await router.begin(list(access.workers))
        assert loop.time() <= START_S, "workers tell of themselves at once"
        tasks: set[asyncio.Task[None]] = set()
        watched: list[asyncio.Task[None]] = []
        for arrival in self._arrivals:
            await asyncio.sleep(max(0.0, START_S + arrival.at_s - loop.time()))
            measured = self._first <= arrival.number < self._end
            request = SimulatedRequest(
                self, routers[arrival.number % len(routers)], arrival, measured=measured
            )
            task = loop.create_task(request.live())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if measured:
                watched.append(task)
        for task in watched:
            await task  # what went wrong in it is raised here
        for worker in self.decode.values():
            worker.note_usage()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in routers:
            await router.end()
