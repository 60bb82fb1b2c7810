"""LoadReporter: tells the controller once a second what this router sees, for the autoscaler."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING

from legato.cluster.load_window import LoadWindow
from legato.cluster.router_load import REPORT_PERIOD_S, router_load

if TYPE_CHECKING:
    from legato.cluster.admission import Admission
    from legato.cluster.control_plane import ControlPlane
    from legato.cluster.pool_view import PoolView

log = logging.getLogger(__name__)


class LoadReporter:
    """Of one router. A controller that does not answer costs a report, and nothing else."""

    def __init__(self, control: ControlPlane, admission: Admission, pool: PoolView) -> None:
        self.window = LoadWindow()
        self._router_id = uuid.uuid4().hex
        self._control = control
        self._admission = admission
        self._pool = pool
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def start(self) -> None:
        """Begins to report."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends it. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            await self._report()

    async def _report(self) -> None:
        load = router_load(
            self._router_id,
            self.window.close_slot(time.monotonic()),
            self._admission.waiting(),
            self._pool.placeable("prefill"),
            self._pool.placeable("decode"),
        )
        try:
            await self._control.report_load(load)
        except Exception as error:  # whatever it is, the requests do not depend on it
            if not self._failing:
                log.warning("the controller takes no report of load: %r", error)
            self._failing = True
        else:
            self._failing = False
