"""Interference: how much longer short hand-offs take beside a long one."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from legato.bench.handoff.lanes import LaneSender
from legato.bench.workload import percentile

if TYPE_CHECKING:
    from legato.bench.handoff.two_workers import TwoWorkers
    from legato.protos import worker_pb2
    from legato.worker.kv.block_lease import BlockLease

LONG_TOKENS = 4000
SHORT_TOKENS = 128
NUM_SHORT = 8


@dataclass(frozen=True)
class Interference:
    """Seconds from the ticket to the commit of one short hand-off."""

    lane: str
    long_tokens: int
    short_tokens: int
    num_short: int  # at once
    num_rounds: int
    alone_p50_s: float
    alone_p99_s: float
    beside_p50_s: float
    beside_p99_s: float
    p99_ratio: float
    p50_ratio: float

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


class InterferenceRun:
    """Short ones at once, alone and then beside a long one, in turns.

    Beside: the long one has been sending for a moment when they begin, and whenever it ends before
    they do, another one begins.
    """

    def __init__(self, workers: TwoWorkers, lane: str) -> None:
        self._workers = workers
        self._lane = lane

    async def measure(self, num_rounds: int) -> Interference:
        """One more round comes first, which does not count."""
        workers = self._workers
        sender = LaneSender(workers.node, self._lane)
        long = workers.rows(LONG_TOKENS)
        short = [workers.rows(SHORT_TOKENS, seed=1 + i) for i in range(NUM_SHORT)]
        alone: list[float] = []
        beside: list[float] = []
        try:
            for turn in range(-1, num_rounds):
                times = await self._short(sender, short)
                under_way = asyncio.Event()
                sending = asyncio.create_task(self._long(sender, long, under_way))
                try:
                    await _first(under_way, sending)
                    times_beside = await self._short(sender, short)
                    if sending.done():
                        sending.result()
                finally:
                    sending.cancel()
                    with suppress(asyncio.CancelledError):
                        await sending
                if turn >= 0:
                    alone += times
                    beside += times_beside
        finally:
            await sender.close()
            for lease in (long, *short):
                lease.release()
        return Interference(
            lane=self._lane,
            long_tokens=LONG_TOKENS,
            short_tokens=SHORT_TOKENS,
            num_short=NUM_SHORT,
            num_rounds=num_rounds,
            alone_p50_s=percentile(alone, 50),
            alone_p99_s=percentile(alone, 99),
            beside_p50_s=percentile(beside, 50),
            beside_p99_s=percentile(beside, 99),
            p99_ratio=percentile(beside, 99) / percentile(alone, 99),
            p50_ratio=percentile(beside, 50) / percentile(alone, 50),
        )

    async def _short(self, sender: LaneSender, leases: list[BlockLease]) -> list[float]:
        async with AsyncExitStack() as stack:
            tickets = [
                await stack.enter_async_context(self._workers.ticket(SHORT_TOKENS)) for _ in leases
            ]
            return list(
                await asyncio.gather(
                    *(
                        self._timed(sender, lease, ticket)
                        for lease, ticket in zip(leases, tickets, strict=True)
                    )
                )
            )

    async def _timed(
        self, sender: LaneSender, lease: BlockLease, ticket: worker_pb2.KvTicket
    ) -> float:
        started_s = time.perf_counter()
        await sender.send(lease, SHORT_TOKENS, ticket, self._workers.decode_address)
        return time.perf_counter() - started_s

    async def _long(self, sender: LaneSender, lease: BlockLease, under_way: asyncio.Event) -> None:
        """One after the other, until it is cancelled."""
        while True:
            async with self._workers.ticket(LONG_TOKENS) as ticket:
                sending = asyncio.create_task(
                    sender.send(lease, LONG_TOKENS, ticket, self._workers.decode_address)
                )
                try:
                    await asyncio.sleep(0.005)
                    under_way.set()
                    await sending
                finally:
                    sending.cancel()
                    with suppress(asyncio.CancelledError):
                        await sending


async def _first(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Waits for the event, or for the task, which ends with an error only."""
    waiting = asyncio.create_task(event.wait())
    done, _ = await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task in done:
        task.result()
