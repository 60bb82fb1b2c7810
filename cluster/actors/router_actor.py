"""RouterActor: the router in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cluster.actors.control_calls import ControlCalls
from legato.cluster.actors.logs import begin_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.actors.plans import RouterPlan
    from legato.cluster.control_plane import WorkerEndpoint


class RouterActor:
    """Hosts the Router."""

    def __init__(self) -> None:
        self._router: Any = None
        self._started = asyncio.Event()

    async def start(self, controller: Any, plan: RouterPlan) -> str:  # noqa: ANN401  # an actor handle has no static type
        """Serves the public address, and returns it."""
        from legato.cluster.router import Router
        from legato.cluster.text.model_text import ModelText

        begin_logging()
        text = await asyncio.to_thread(ModelText.load, Path(plan.model_path))
        self._router = Router(
            plan.options,
            text,
            ControlCalls(controller),
            model_name=plan.model_name,
            version=plan.version,
            owner_pid=plan.owner_pid,
            owner_host=plan.owner_host,
        )
        address: str = await self._router.start()
        self._started.set()
        return address

    async def set_workers(self, workers: Sequence[WorkerEndpoint]) -> None:
        """The full list, as it is now."""
        await self._started.wait()
        await self._router.set_workers(workers)

    async def end(self, drain_timeout_s: float) -> None:
        """No new requests; running ones have `drain_timeout_s`; then the port closes."""
        if self._router is not None:
            await self._router.drain(drain_timeout_s)
            await self._router.stop()

    async def watch(self) -> None:
        """Never returns; see `WorkerActor.watch`."""
        await asyncio.Event().wait()
