"""Rates: how fast KV is handed over on each lane, beside the limits of the machine."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from legato.bench.handoff.bare_grpc import BareStream
from legato.bench.handoff.copies import PlainCopy, SharedRing
from legato.bench.handoff.lanes import LANES, LaneSender, chunk_bytes, window_bytes
from legato.bench.handoff.rows_digest import rows_digest
from legato.bench.handoff.spread import Spread
from legato.bench.handoff.two_workers import TwoWorkers, memory_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from legato.worker.kv.block_lease import BlockLease

BARE_GRPC = "bare_grpc"
MEMCPY = "memcpy"
SHARED_MEMCPY = "memcpy_in_and_out"
# What each lane is to be measured by.
LIMITS_OF_LANE = {"grpc": (BARE_GRPC,), "shared_memory": (MEMCPY, SHARED_MEMCPY)}


class WrongRowsError(Exception):
    """What has landed is not what was sent."""


@dataclass(frozen=True)
class Rates:
    """Of one prompt's KV, sent again and again."""

    dtype: str
    num_tokens: int
    num_bytes: int
    chunk_bytes: int  # of the gRPC lane, as the next one
    window_bytes: int
    slot_bytes: int  # of the shared memory, as the next one
    memory_bytes: int
    bytes_per_s: dict[str, Spread]  # by lane and limit
    of_limit: dict[str, Spread]  # "lane/limit": 1 is the limit
    # Of the sending and of the receiving process, all threads, the ticket included: hardly moved by
    # what else the machine does.
    cpu_s_per_gb: dict[str, tuple[float, float]]

    def as_json(self) -> dict[str, object]:
        """Plain values; rates in GB/s."""
        gigabytes = {
            name: {k: v / 1e9 for k, v in asdict(rate).items()}
            for name, rate in self.bytes_per_s.items()
        }
        fields = asdict(self)
        del fields["bytes_per_s"]
        return fields | {"gb_per_s": gigabytes}


class RatesRun:
    """Everything takes turns in each round, every round begins with another one."""

    def __init__(self, workers: TwoWorkers, num_tokens: int, lanes: Sequence[str] = LANES) -> None:
        self._workers = workers
        self._num_tokens = num_tokens
        self._lanes = lanes
        self.num_bytes = num_tokens * workers.node.cache.shape.bytes_per_token
        self._chunk_bytes, self._window_bytes = chunk_bytes("grpc"), window_bytes("grpc")
        self._slot_bytes = chunk_bytes("shared_memory")
        self._memory_bytes = window_bytes("shared_memory")

    async def measure(self, num_rounds: int, limits: Sequence[str]) -> Rates:
        """One more round comes first, which does not count and in which the rows are compared.

        Raises:
            WrongRowsError: they are not the same.
        """
        seconds: dict[str, list[float]] = {}
        cpu: dict[str, list[tuple[float, float]]] = {}
        async with self._measures(limits) as measures:
            names = list(measures)
            for turn in range(-1, num_rounds):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    before = await self._cpu_seconds()
                    elapsed_s = await measures[name]()
                    after = await self._cpu_seconds()
                    if turn >= 0:
                        seconds.setdefault(name, []).append(elapsed_s)
                        used = after[0] - before[0], after[1] - before[1]
                        cpu.setdefault(name, []).append(used)
        rates = {name: [self.num_bytes / s for s in times] for name, times in seconds.items()}
        return Rates(
            dtype=str(self._workers.node.cache.shape.dtype).removeprefix("torch."),
            num_tokens=self._num_tokens,
            num_bytes=self.num_bytes,
            chunk_bytes=self._chunk_bytes,
            window_bytes=self._window_bytes,
            slot_bytes=self._slot_bytes,
            memory_bytes=self._memory_bytes,
            bytes_per_s={name: Spread.of(values) for name, values in rates.items()},
            of_limit={
                f"{lane}/{limit}": Spread.of_ratios(rates[lane], rates[limit])
                for lane in self._lanes
                for limit in LIMITS_OF_LANE[lane]
                if limit in rates
            },
            cpu_s_per_gb={
                name: (
                    statistics.median(sending for sending, _ in used) / self.num_bytes * 1e9,
                    statistics.median(receiving for _, receiving in used) / self.num_bytes * 1e9,
                )
                for name, used in cpu.items()
                if name in (*self._lanes, BARE_GRPC)  # those that copy spin where they wait
            },
        )

    async def _cpu_seconds(self) -> tuple[float, float]:
        """Since they started: of this process, and of the receiving one."""
        return time.process_time(), (await self._workers.ask("CpuSeconds"))["seconds"]

    @asynccontextmanager
    async def _measures(
        self, limits: Sequence[str]
    ) -> AsyncIterator[dict[str, Callable[[], Awaitable[float]]]]:
        """By name; what gives the seconds of all bytes once."""
        rows = self._workers.rows(self._num_tokens)
        senders = {lane: LaneSender(self._workers.node, lane) for lane in self._lanes}
        stream = BareStream(
            self._workers.limits_address, self._chunk_bytes, self.num_bytes, self._window_bytes
        )
        measures: dict[str, Callable[[], Awaitable[float]]] = {}
        try:
            for lane, sender in senders.items():
                await self._compare(sender, rows)
                measures[lane] = self._sending(sender, rows)
            if BARE_GRPC in limits:
                measures[BARE_GRPC] = stream.seconds
            if MEMCPY in limits:
                measures[MEMCPY] = self._copying()
            if SHARED_MEMCPY in limits:
                measures[SHARED_MEMCPY] = self._sharing()
            yield measures
        finally:
            await stream.close()
            for sender in senders.values():
                await sender.close()
            rows.release()

    async def _compare(self, sender: LaneSender, rows: BlockLease) -> None:
        workers = self._workers
        sent = rows_digest(workers.node.cache, rows.blocks, self._num_tokens)
        async with workers.ticket(self._num_tokens) as ticket:
            await sender.send(rows, self._num_tokens, ticket, workers.decode_address)
            landed = await workers.ask("Digest", epoch=ticket.epoch, num_tokens=self._num_tokens)
        if landed["digest"] != sent:
            raise WrongRowsError("the rows that have landed are not those that were sent")

    def _sending(self, sender: LaneSender, rows: BlockLease) -> Callable[[], Awaitable[float]]:
        async def send() -> float:
            """From the ticket to the commit."""
            async with self._workers.ticket(self._num_tokens) as ticket:
                started_s = time.perf_counter()
                num_bytes = await sender.send(
                    rows, self._num_tokens, ticket, self._workers.decode_address
                )
                elapsed_s = time.perf_counter() - started_s
            assert num_bytes == self.num_bytes
            return elapsed_s

        return send

    def _copying(self) -> Callable[[], Awaitable[float]]:
        copy = PlainCopy(self.num_bytes, self._slot_bytes)

        async def seconds() -> float:
            return await asyncio.to_thread(copy.seconds)

        return seconds

    def _sharing(self) -> Callable[[], Awaitable[float]]:
        num_slots = max(2, self._memory_bytes // self._slot_bytes)
        source = np.full(self.num_bytes, 1, np.uint8)

        async def seconds() -> float:
            """Of the second time: at the first the pages are mapped and touched."""
            ring, file = SharedRing.create(num_slots, self._slot_bytes)

            def copy() -> float:
                ring.copy_in(source)
                started_s = time.perf_counter()
                ring.copy_in(source)
                return time.perf_counter() - started_s

            try:
                copying_out = asyncio.create_task(
                    self._workers.ask(
                        "CopyOut",
                        path=memory_path(file),
                        num_slots=num_slots,
                        slot_bytes=self._slot_bytes,
                        num_bytes=self.num_bytes,
                        times=2,
                    )
                )
                elapsed_s = await asyncio.to_thread(copy)
                await copying_out
            finally:
                os.close(file)
            return elapsed_s

        return seconds
