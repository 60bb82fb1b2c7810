"""SimulatedRouter: the production queue and pools of one router, over simulated workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.cluster.admission import Admission
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.pool_view import PoolView
from legato.cluster.prefill_costs import PrefillCostBook
from legato.cluster.router import TICK_S

if TYPE_CHECKING:
    from legato.cluster.config import RouterOptions
    from legato.plan.simulation.channel import SimulatedAccess


class SimulatedRouter:
    """What of a router decides; nothing of what it passes on."""

    def __init__(self, options: RouterOptions, access: SimulatedAccess) -> None:
        loop = asyncio.get_running_loop()
        self.options = options
        self.costs = PrefillCostBook(loop.time)
        self.pool = PoolView(
            None,  # type: ignore[arg-type]  # it is told of lost workers only, and none is
            worker_silence_s=options.worker_silence_s,
            on_change=self._wake,
            now=loop.time,
            access=access,
        )
        self.admission = Admission(
            options,
            self.pool,
            now=loop.time,
            wall_ns=lambda: int(loop.time() * 1e9),
            costs=self.costs.costs,
        )
        self._ticker = loop.create_task(self._tick())

    async def begin(self, worker_ids: list[str]) -> None:
        """Returns when it knows them all."""
        self.pool.set_workers(
            [
                WorkerEndpoint(
                    worker_id, "prefill" if worker_id.startswith("prefill") else "decode", worker_id
                )
                for worker_id in worker_ids
            ]
        )
        while not all(v.placeable for v in self.pool.views()):  # noqa: ASYNC110  # at most twice
            await asyncio.sleep(TICK_S)

    async def end(self) -> None:
        """Ends its tasks."""
        self._ticker.cancel()
        await self.pool.close()

    def _wake(self) -> None:
        self.admission.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.pool.check_silence()
            self.admission.dispatch()
