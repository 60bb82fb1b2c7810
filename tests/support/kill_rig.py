"""KillRig: a service by the real command, a request log, and a hand that strikes its workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from owners import Ledger, Strike, check_owners
from raw_client import RawClient
from served import Served

from legato.protos import common_pb2

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from history import CallHistory

    from legato.protos import cluster_pb2

READY = common_pb2.WORKER_PHASE_READY
ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}
READY_BOUND_S = 60.0
# Small chunks, blocks and steps: a random moment can hit any phase of a request.
SMALL = ("--kv-memory", "32MiB", "--threads", "1", "--prefill-chunk-tokens", "64")


@dataclass
class KillRig:
    """Use `kill_rig`. `strikes` is what was done so far."""

    served: Served
    client: RawClient
    log: Path
    strikes: list[Strike] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.served.address

    async def workers(self, role: str = "") -> list[cluster_pb2.WorkerStatus]:
        """The ready ones, of one pool or of both."""
        status = await self.client.status()
        return [
            worker
            for pool in status.pools
            for worker in pool.workers
            if worker.phase == READY and role in ("", ROLES[worker.role])
        ]

    def strike(self, worker: cluster_pb2.WorkerStatus, number: signal.Signals) -> Strike:
        """Sends the signal, and remembers it."""
        strike = Strike(time.time(), worker.worker_id, ROLES[worker.role], worker.pid)
        os.kill(worker.pid, number)
        self.strikes.append(strike)
        return strike

    async def strike_at_random(
        self, period_s: float, most: int, least_alive: int, dice: random.Random
    ) -> None:
        """Kills one random worker of either pool again and again, until cancelled.

        It may be the last of its pool. Where a start takes longer than the period, on a slow
        machine, the next kill waits until so many are alive, and some in each pool: else nobody
        ever lived.
        """
        while len(self.strikes) < most:
            await asyncio.sleep(period_s * dice.uniform(0.5, 1.5))
            workers = await self.workers()
            roles = {ROLES[worker.role] for worker in workers}
            if len(workers) >= least_alive and roles == set(ROLES.values()):
                self.strike(dice.choice(workers), signal.SIGKILL)

    async def until_ready(self, prefill: int, decode: int) -> None:
        """So many are ready in each pool, and no others are there."""
        wanted = [(prefill, prefill), (decode, decode)]
        async with asyncio.timeout(READY_BOUND_S):
            while True:
                status = await self.client.status()
                if [(len(p.workers), p.ready) for p in status.pools] == wanted and status.ready:
                    return
                await asyncio.sleep(0.05)

    def lines(self) -> list[dict[str, Any]]:
        """The request log as it is now; the last line may be in writing."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    async def until_busy(self, worker: cluster_pb2.WorkerStatus) -> None:
        """The router has something on that worker."""
        async with asyncio.timeout(READY_BOUND_S):
            while True:
                ledger = Ledger()
                for line in self.lines():
                    ledger.take(line)
                if ledger.hits(ROLES[worker.role], worker.worker_id):
                    return
                await asyncio.sleep(0.02)

    async def until_lost(self, strike: Strike, bound_s: float) -> float:
        """Seconds from the strike until the router counted no more on its worker."""
        async with asyncio.timeout(bound_s):
            while True:
                for line in self.lines():
                    is_it = line.get("worker") == strike.worker_id
                    if is_it and line["state"] != "ready" and line["at_s"] >= strike.at_s:
                        return float(line["at_s"]) - strike.at_s
                await asyncio.sleep(0.05)

    async def until_gone(self, worker_id: str, bound_s: float) -> None:
        """The controller has it no more."""
        async with asyncio.timeout(bound_s):
            while True:
                pools = (await self.client.status()).pools
                if all(w.worker_id != worker_id for pool in pools for w in pool.workers):
                    return
                await asyncio.sleep(0.05)

    async def check_owners(self, calls: Iterable[CallHistory]) -> list[str]:
        """Of all requests so far, once the router has let go of the last."""
        async with asyncio.timeout(10):
            while (await self.client.status()).router.in_flight:  # noqa: ASYNC110  # remote
                await asyncio.sleep(0.05)
        cancels = {c.request_id: c.cancelled_at_s for c in calls if c.cancelled_at_s is not None}
        return check_owners(self.lines(), cancels)


@contextmanager
def logged_service(
    model: Path, folder: Path, *words: str, prefill: int, decode: int
) -> Iterator[tuple[Served, Path]]:
    """A service with so many workers, and its request log; ended with the block."""
    log = folder / "requests.jsonl"
    pools = ("--prefill", str(prefill), "--decode", str(decode))
    words = ("--model", str(model), *pools, *SMALL, "--request-log", str(log), *words)
    with Served(folder / "serve.log", *words) as served:
        yield served, log


@asynccontextmanager
async def kill_rig(served: Served, log: Path) -> AsyncIterator[KillRig]:
    """A hand over it, and a client."""
    async with RawClient(served.address) as client:
        yield KillRig(served, client, log)
