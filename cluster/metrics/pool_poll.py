"""PoolPoll: what the controller last told of its pools and its autoscaler."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.control_plane import ControlPlane
    from legato.protos import cluster_pb2

PERIOD_S = 2.0
TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class PoolPoll:
    """Asks again and again, so that nobody who wants to know has to wait for the controller."""

    def __init__(self, control: ControlPlane, *, is_autoscaled: bool) -> None:
        self._control = control
        self._is_autoscaled = is_autoscaled
        self._task: asyncio.Task[None] | None = None
        # None: there was no answer the last time.
        self.pools: Sequence[cluster_pb2.PoolStatus] | None = None
        self.autoscaler: cluster_pb2.AutoscalerStatus | None = None

    def start(self) -> None:
        """Begins to ask."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(PERIOD_S)

    async def ask(self) -> None:
        """Once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                pools = await self._control.pools()
                autoscaler = await self._control.autoscaler() if self._is_autoscaled else None
        except Exception as error:  # whatever it is, the requests do not depend on it
            if self.pools is not None:
                log.warning("the controller does not tell its pools: %r", error)
            self.pools = self.autoscaler = None
        else:
            self.pools, self.autoscaler = pools, autoscaler
