"""ControllerActor: the controller in a process of its own, driven by the clock."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from legato.cluster.actors.launcher import RayLauncher
from legato.cluster.actors.logs import begin_logging
from legato.cluster.autoscale_loop import AutoscaleLoop
from legato.cluster.controller import Controller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.control_plane import Role, WorkerEndpoint
    from legato.cluster.pool import ControllerOptions
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad

PUBLISH_TIMEOUT_S = 60.0  # the router may still be reading its tokenizer
STEP_PERIOD_S = 0.2


class ControllerActor:
    """Hosts the Controller, and drives it by the clock."""

    def __init__(
        self, plan: WorkerPlan, targets: Mapping[Role, int], options: ControllerOptions
    ) -> None:
        begin_logging()
        self._launcher = RayLauncher(plan)
        self._controller = Controller(self._launcher, self._note_change, targets, options)
        self._launcher.controller = self._controller
        self._autoscale: AutoscaleLoop | None = None
        if options.autoscale is not None:
            self._autoscale = AutoscaleLoop(
                options.autoscale, self._controller, time.monotonic(), self._flip
            )
        self._snapshot: tuple[WorkerEndpoint, ...] = ()
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._drain_timeout_s = 0.0

    async def run(self, router: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        """Reconciles until the actor ends. If it ever fails, the service ends."""
        publisher = asyncio.create_task(self._publish(router))
        nodes = asyncio.create_task(self._launcher.watch_nodes())
        while not publisher.done() and not nodes.done():
            now_s = time.monotonic()
            self._controller.step(now_s)
            if self._autoscale is not None:
                self._autoscale.step(now_s)
            await asyncio.sleep(STEP_PERIOD_S)
        (publisher if publisher.done() else nodes).result()

    async def pools(self) -> list[bytes]:
        """Of both pools, as messages: their wire form is stable, their Python form is not."""
        return [pool.SerializeToString() for pool in self._controller.pools(time.monotonic())]

    async def scale(self, targets: Mapping[Role, int]) -> dict[Role, int]:
        """An operator's; see AutoscaleLoop.scale_by_hand and Controller.set_targets."""
        if self._autoscale is not None:
            return self._autoscale.scale_by_hand(targets, time.monotonic())
        return self._controller.set_targets(targets, time.monotonic())

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """See Controller.change_role."""
        change = self._controller.change_role(worker_id, role, time.monotonic())
        if self._autoscale is not None:
            self._autoscale.note_role_change(time.monotonic())
        return change

    def _flip(self, worker_id: str, role: Role) -> None:
        self._controller.change_role(worker_id, role, time.monotonic())

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See Controller.report_lost."""
        self._controller.report_lost(worker_id, reason, time.monotonic())

    async def report_load(self, load: RouterLoad) -> None:
        """See AutoscaleLoop.note_load; routers call it only where the pools are autoscaled."""
        if self._autoscale is not None:
            self._autoscale.note_load(load, time.monotonic())

    async def autoscaler(self) -> bytes:
        """See AutoscaleLoop.status; an empty message where the pools are not autoscaled."""
        if self._autoscale is None:
            return b""
        return self._autoscale.status(time.monotonic()).SerializeToString()

    async def shutdown(self, drain_timeout_s: float) -> None:
        """Lets the owner know; it does the rest."""
        self._controller.close()
        self._drain_timeout_s = drain_timeout_s
        self._ending.set()

    async def shutdown_asked(self) -> float:
        """Returns when somebody asked for the end: the seconds given to running requests."""
        await self._ending.wait()
        return self._drain_timeout_s

    async def hopeless(self) -> str:
        """See Controller.hopeless; or why no node can hold a worker that has no place yet."""
        return self._controller.hopeless() or self._launcher.hopeless()

    async def stop_workers(self, grace_s: float) -> None:
        """Ends every worker and starts no other."""
        self._controller.close()
        await self._launcher.stop_all(grace_s)

    def _note_change(self, endpoints: tuple[WorkerEndpoint, ...]) -> None:
        self._snapshot = endpoints
        self._changed.set()

    async def _publish(self, router: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        # One call at a time, always the newest list: calls to an async actor may overtake.
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.wait_for(router.set_workers.remote(self._snapshot), PUBLISH_TIMEOUT_S)
