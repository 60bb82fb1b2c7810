"""send_load: sends a workload to a server, and notes when its tokens came."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from legato.bench.load.grpc_target import GrpcTarget
from legato.bench.load.sample import Sample
from legato.bench.load.warmup import Place, Span, Warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from legato.bench.load.target import Target
    from legato.bench.load.workload import LoadWorkload, Planned
    from legato.cluster.client_access import ClientAccess

# What a stream of a closed load waits behind a failure: one that is refused at once would else
# ask thousands of times in a second.
FAILURE_PAUSE_S = 0.1


async def send_load(
    workload: LoadWorkload,
    target: Target,
    *,
    timeout_s: float,
    stop: asyncio.Event | None = None,
    on_change: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """All samples, those of the warm-up too, in the order in which they were due.

    `target`: entered. When `stop` is set nothing more is sent, and what runs is cancelled.
    `on_change` is called with each request that is sent, and again when it has ended.

    Raises:
        ValueError: a request is longer than the model's context.
    """
    check_lengths(workload, target.served.context_length)
    run = _Run(workload, target, timeout_s, on_change)
    await run.to_end(stop or asyncio.Event())
    return run.samples


async def run_load(
    workload: LoadWorkload,
    addresses: Sequence[str],
    access: ClientAccess,
    *,
    timeout_s: float,
    num_warmup: int = 0,
    stop: asyncio.Event | None = None,
) -> list[Sample]:
    """`send_load` over gRPC, with the samples that count. `addresses`: routers, which take turns.
    `num_warmup`: more than zero in the place of the workload's own warm-up.

    Raises:
        ValueError: a request is longer than the model's context.
        grpc.RpcError: the service does not say what it serves, or does not answer.
    """
    if num_warmup:
        workload = dataclasses.replace(workload, warmup=Warmup(num_warmup))
    async with GrpcTarget(addresses, access) as target:
        samples = await send_load(workload, target, timeout_s=timeout_s, stop=stop)
    return [sample for sample in samples if not sample.is_warmup]


def check_lengths(workload: LoadWorkload, context_length: int | None) -> None:
    """Raises ValueError where the longest request is beyond the context."""
    _, most = workload.longest
    if context_length is not None and most > context_length:
        raise ValueError(
            f"prompt and answer have up to {most:,} tokens, limit {context_length:,}: the model's "
            "context"
        )


class _Run:
    def __init__(
        self,
        workload: LoadWorkload,
        target: Target,
        timeout_s: float,
        on_change: Callable[[Sample], None],
    ) -> None:
        self._workload = workload
        self._target = target
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._span = Span(workload)
        self.samples: list[Sample] = []

    async def to_end(self, stop: asyncio.Event) -> None:
        began_s = time.monotonic()
        requests = self._workload.requests()
        if self._workload.is_open:
            sending = [self._send_when_due(requests, began_s)]
        else:
            assert self._workload.concurrency is not None
            sending = [
                self._send_in_turn(requests, began_s, stream)
                for stream in range(self._workload.concurrency)
            ]
        all_sent = asyncio.gather(*sending)
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((all_sent, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not all_sent.done():
                all_sent.cancel()
        try:
            await all_sent
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        self.samples.sort(key=lambda sample: sample.due_s)

    async def _send_when_due(self, requests: Iterator[Planned], began_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for planned in requests:
                assert planned.at_s is not None
                place = self._span.place(planned.number, planned.at_s)
                assert place is not Place.OVER, "the workload ends there by itself"
                request = self._target.request(self._workload, planned)
                due_s = began_s + planned.at_s
                # Also where it is late: the answers that have come are read in between.
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                sample = Sample(planned, due_s, time.monotonic())
                sample.is_warmup = place is Place.WARM_UP
                group.create_task(self._request(request, sample))

    async def _send_in_turn(self, requests: Iterator[Planned], began_s: float, stream: int) -> None:
        for planned in requests:
            request = self._target.request(self._workload, planned)
            now_s = time.monotonic()
            place = self._span.place(planned.number, now_s - began_s)
            if place is Place.OVER:
                return
            sample = Sample(planned, now_s, now_s, stream=stream)
            sample.is_warmup = place is Place.WARM_UP
            await self._request(request, sample)
            if not sample.ok:
                await asyncio.sleep(FAILURE_PAUSE_S)

    async def _request(self, request: Any, sample: Sample) -> None:  # noqa: ANN401  # the target's
        self.samples.append(sample)
        self._on_change(sample)
        try:
            await self._target.send(request, sample, self._timeout_s)
        finally:
            if sample.ended_s is None:  # cancelled
                sample.ended_s = time.monotonic()
            self._on_change(sample)
