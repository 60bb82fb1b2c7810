"""RouterActor: a router in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import ActorDiedError, RayError

from legato.cluster.actors.control_calls import ControlCalls
from legato.cluster.actors.head_store import HeadStore
from legato.cluster.actors.logs import begin_logging
from legato.cluster.actors.worker_process import WorkerProcess
from legato.cluster.open_files import raise_open_files

if TYPE_CHECKING:
    from legato.cluster.actors.plans import RouterPlan

FOLLOW_TIMEOUT_S = 15.0  # longer than the controller holds a question
RETRY_S = 0.2
# For the port of a process that has just been killed to become free.
BIND_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterPlace:
    """Where a router serves."""

    address: str  # host:port
    process: WorkerProcess
    http_address: str = ""  # host:port of its HTTP endpoint, where it has one


class RouterActor:
    """Hosts a Router, and keeps its list of workers the controller's newest.

    Ray restarts its process where that ends; it then serves at the port that it had.
    """

    async def __init__(self, controller: Any, plan: RouterPlan, number: int) -> None:  # type: ignore[misc]  # noqa: ANN401  # Ray awaits it; an actor handle has no static type
        begin_logging()
        raise_open_files()
        self._controller = controller
        self._plan = plan
        self._number = number
        self._router: Any = None
        self._ends_asked: asyncio.Queue[float] = asyncio.Queue()
        self._serving = asyncio.create_task(self._serve())
        self._following: asyncio.Task[None] | None = None

    async def place(self) -> RouterPlace:
        """Where it serves, once it does; ValueError or OSError where it cannot."""
        return await asyncio.shield(self._serving)

    async def end_asked(self) -> float:
        """Returns when somebody asked for the service's end, each time that somebody does: the
        seconds given to running requests.

        The call fails at the moment when the process ends.
        """
        return await self._ends_asked.get()

    async def drain(self, drain_timeout_s: float) -> int:
        """See Router.drain."""
        return 0 if self._router is None else await self._router.drain(drain_timeout_s)

    async def close(self, num_cut: int) -> None:
        """The port closes; who waits for the end is told what it cost."""
        if self._router is not None:
            self._router.tell_end(num_cut)
            await self._router.stop()

    async def _serve(self) -> RouterPlace:
        from legato.cluster.router import Router
        from legato.cluster.text.model_text import ModelText

        plan = self._plan
        text = await asyncio.to_thread(ModelText.load, Path(plan.model_path))
        context = ray.get_runtime_context()
        store, key = HeadStore(context.namespace), f"ports-{self._number}"
        earlier_ports = await store.recall(key)
        port, http_port = earlier_ports or (
            plan.port_of(self._number),
            plan.http_port_of(self._number),
        )
        router = Router(
            dataclasses.replace(plan.options, port=port, http_port=http_port),
            text,
            ControlCalls(self._controller, self._ask_end),
            model_name=plan.model_name,
            version=plan.version,
            owner_pid=plan.owner_pid,
            owner_host=plan.owner_host,
            started_at=plan.started_at,
        )
        address = await _bind(router, 0.0 if earlier_ports is None else BIND_TIMEOUT_S)
        ports = [_port(at) if at else None for at in (address, router.http_address)]
        await store.keep(key, ports)
        self._router = router
        self._following = asyncio.create_task(self._follow())
        me = psutil.Process()
        process = WorkerProcess(context.get_node_id(), me.pid, me.create_time())
        return RouterPlace(address, process, router.http_address)

    def _ask_end(self, drain_timeout_s: float) -> None:
        self._ends_asked.put_nowait(drain_timeout_s)

    async def _follow(self) -> None:
        """Asks the controller for its list, over and over: the answer comes when there is news.
        While there is no answer, the router goes on with the list that it has.
        """
        known = None
        while True:
            try:
                asked = self._controller.workers.remote(known)
                known, workers = await asyncio.wait_for(asked, FOLLOW_TIMEOUT_S)
            except ActorDiedError:
                log.exception("the controller is gone for good: no news of workers any more")
                return
            except (RayError, TimeoutError) as error:
                log.warning("no news of workers from the controller: %s", type(error).__name__)
                await asyncio.sleep(RETRY_S)
                continue
            await self._router.set_workers(workers)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def _bind(router: Any, patience_s: float) -> str:  # noqa: ANN401  # imported late
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    while True:
        try:
            address: str = await router.start()
        except OSError:
            if loop.time() > deadline_s:
                raise
            await asyncio.sleep(RETRY_S)
        else:
            return address
