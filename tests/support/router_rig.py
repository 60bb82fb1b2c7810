"""RouterRig: a service with two routers by the real command, their request log, and a hand that
strikes them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
from kill_rig import read_lines
from owners import Ledger, RouterEnd, check_owners
from served import runs
from workload import record_stream

from legato.cluster.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from history import CallHistory
    from served import Served

    from legato.protos import generation_pb2

BOUND_S = 60.0
STREAM_TIMEOUT_S = 120.0


@dataclass
class RouterRig:
    """`ends` is what was done so far."""

    served: Served
    log: Path
    ends: list[RouterEnd] = field(default_factory=list)

    @property
    def addresses(self) -> list[str]:
        """Of each router."""
        return self.served.address.split(",")

    def process_at(self, address: str) -> psutil.Process:
        """Of the router that listens there."""
        port = int(address.rpartition(":")[2])
        self.served.note_descendants()
        for process in {*self.served.descendants}:
            if runs(process) and any(
                c.status == psutil.CONN_LISTEN and c.laddr.port == port
                for c in process.net_connections("tcp")
            ):
                return process
        raise RuntimeError(f"nobody listens at {address}")

    def kill(self, router: psutil.Process) -> None:
        """Returns when it does nothing more; nobody may have asked another router meanwhile."""
        router.kill()
        deadline_s = time.monotonic() + BOUND_S
        while runs(router):
            assert time.monotonic() < deadline_s, "it outlives SIGKILL"
            time.sleep(0.001)
        self.ends.append(RouterEnd(time.time(), router.pid))

    def stop(self, router: psutil.Process) -> None:
        """SIGSTOP, until `run_on`."""
        router.send_signal(signal.SIGSTOP)
        self.ends.append(RouterEnd(time.time(), router.pid))

    def run_on(self, router: psutil.Process) -> None:
        """SIGCONT, where its owner has not ended it."""
        if runs(router):
            stopped = next(end for end in self.ends if end.router == router.pid)
            self.ends[self.ends.index(stopped)] = RouterEnd(
                stopped.at_s, router.pid, until_s=time.time()
            )
            router.send_signal(signal.SIGCONT)

    async def strike_amid(
        self,
        client: AsyncClient,
        requests: Sequence[generation_pb2.GenerateRequest],
        router: psutil.Process,
        strike: Callable[[psutil.Process], None],
        *,
        least: int,
        delay_s: float,
    ) -> list[CallHistory]:
        """All of them at once; the router is struck so long after workers have `least` of its
        streams.
        """
        streams = [
            asyncio.create_task(record_stream(client, request, timeout_s=STREAM_TIMEOUT_S))
            for request in requests
        ]
        async with asyncio.timeout(BOUND_S):
            while self._num_running(router.pid) < least:  # noqa: ASYNC110  # in a file
                await asyncio.sleep(0.02)
        await asyncio.sleep(delay_s)
        strike(router)
        return await asyncio.gather(*streams)

    async def until_idle(self) -> None:
        """No router has a request any more."""
        for address in self.addresses:
            async with asyncio.timeout(BOUND_S), AsyncClient(address) as client:
                while (await client.status()).router.in_flight:  # noqa: ASYNC110  # remote
                    await asyncio.sleep(0.05)

    def lines(self) -> list[dict[str, Any]]:
        """The request log as it is now."""
        return read_lines(self.log)

    def check_owners(self) -> list[str]:
        """Of all requests so far."""
        return check_owners(self.lines(), {}, self.ends)

    def _num_running(self, router: int) -> int:
        ledger = Ledger()
        for line in self.lines():
            ledger.take(line)
        return sum(r.router == router and bool(r.owners) for r in ledger.requests.values())
