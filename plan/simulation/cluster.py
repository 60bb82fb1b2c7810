"""SimulatedCluster: the workers, links and routers of one simulated service, and its clients."""

from __future__ import annotations

import asyncio
import math
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
    from legato.plan.targets import Targets

# Late first tokens over those that the target allows: then it is missed, and not by chance.
MISSED = 1.5
START_S = 1.0  # until all routers know all workers, and requests begin to come


class SimulatedCluster:
    """To be made within a `VirtualLoop`."""

    def __init__(
        self,
        service: SimulatedService,
        arrivals: Sequence[Arrival],
        run: Run | None,
        *,
        gives_up_by: Targets | None = None,
        concurrency: int | None = None,
    ) -> None:
        """`run`: which requests are measured; None: all. `gives_up_by`: ends once the TTFT target
        of these is clearly missed. `concurrency`: a request comes when one ends, so many at a time.
        """
        self.service = service
        self._arrivals = arrivals
        self._concurrency = concurrency
        if run is None:
            self._first, self._end = 0, len(arrivals)
            self.measures = Measures(START_S, math.inf)
        else:
            self._first, self._end = run.first_measured, run.end_measured
            self.measures = Measures(
                START_S + arrivals[self._first].at_s, START_S + arrivals[self._end].at_s
            )
        if gives_up_by is not None:
            allowed = MISSED * (1 - gives_up_by.percent / 100) * (self._end - self._first)
            self.measures.watch_ttft(gives_up_by.ttft_s, allowed)
        self.links = Links(service.link_bytes_per_s, self.measures)
        table = StepTable(service.times, random.Random(0 if run is None else run.seed))
        computing, decoding = PoolBusy(service.num_prefill), PoolBusy(service.num_decode)
        self.prefill = {
            name: PrefillWorker(name, service, table, self.measures, computing, decoding)
            for name in (f"prefill-{number:04}" for number in range(service.num_prefill))
        }
        self.decode = {
            name: DecodeWorker(name, service, table, self.measures, decoding, computing)
            for name in (f"decode-{number:04}" for number in range(service.num_decode))
        }

    async def begin(self) -> list[SimulatedRouter]:
        """Routers that know all workers."""
        access = SimulatedAccess(
            workers={**self.prefill, **self.decode},
            num_blocks=self.service.num_blocks,
            block_size=self.service.size.block_size,
        )
        routers = [
            SimulatedRouter(self.service.options, access) for _ in range(self.service.num_routers)
        ]
        await asyncio.gather(*(router.begin(list(access.workers)) for router in routers))
        assert asyncio.get_running_loop().time() <= START_S, "workers tell of themselves at once"
        return routers

    async def run(self) -> None:
        """Until every request that is measured has ended."""
        loop = asyncio.get_running_loop()
        routers = await self.begin()
        tasks: set[asyncio.Task[None]] = set()
        clients = loop.create_task(self._send(routers, tasks))
        missed = loop.create_task(self.measures.ttft_missed.wait())
        await asyncio.wait({clients, missed}, return_when=asyncio.FIRST_COMPLETED)
        if clients.done():
            clients.result()
        for worker in self.decode.values():
            worker.note_usage()
        for task in (clients, missed, *tasks):
            task.cancel()
        await asyncio.gather(clients, missed, *tasks, return_exceptions=True)
        for router in routers:
            await router.end()

    async def _send(
        self, routers: Sequence[SimulatedRouter], tasks: set[asyncio.Task[None]]
    ) -> None:
        """Sends all requests; returns when every one that is measured has ended."""
        loop = asyncio.get_running_loop()
        watched: list[asyncio.Task[None]] = []
        slots = asyncio.Semaphore(self._concurrency or len(self._arrivals))
        await asyncio.sleep(START_S - loop.time())
        for arrival in self._arrivals:
            if self._concurrency is None:
                await asyncio.sleep(max(0.0, START_S + arrival.at_s - loop.time()))
            await slots.acquire()
            measured = self._first <= arrival.number < self._end
            request = SimulatedRequest(
                self, routers[arrival.number % len(routers)], arrival, measured=measured
            )
            task = loop.create_task(request.live())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: slots.release())
            if measured:
                watched.append(task)
        for task in watched:
            await task  # what went wrong in it is raised here
