"""run_load: sends a workload to a running service, and notes when its tokens came."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc

from legato.bench.load.sample import Sample, note_tokens
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from legato.bench.load.workload import LoadWorkload, Planned
    from legato.cluster.client_access import ClientAccess

    Stub = generation_pb2_grpc.GenerationAsyncStub

_ASK_TIMEOUT_S = 10.0


async def run_load(
    workload: LoadWorkload,
    addresses: Sequence[str],
    access: ClientAccess,
    *,
    timeout_s: float,
    num_warmup: int = 0,
    stop: asyncio.Event | None = None,
    on_change: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """All samples, in the order in which they were due.

    `addresses`: routers, which take turns. `num_warmup` requests go first, one after the other, and
    are in no figure. When `stop` is set nothing more is sent, and what runs is cancelled.
    `on_change` is called with each request that is sent, and again when it has ended.

    Raises:
        ValueError: a request is longer than the model's context.
        grpc.RpcError: the service does not say what it serves, or a warm-up request failed.
    """
    async with AsyncExitStack() as stack:
        stubs: list[Stub] = []
        for address in addresses:
            channel = access.aio_channel(address, CHANNEL_OPTIONS)
            stack.push_async_callback(channel.close)
            stubs.append(generation_pb2_grpc.GenerationStub(channel))
        model = await stubs[0].GetModel(generation_pb2.GetModelRequest(), timeout=_ASK_TIMEOUT_S)
        check_lengths(workload, model.context_length)
        run = _Run(workload, stubs, model.vocab_size, timeout_s, on_change)
        await run.warm_up(num_warmup)
        await run.to_end(stop or asyncio.Event())
        return run.samples


def check_lengths(workload: LoadWorkload, context_length: int) -> None:
    """Raises ValueError where the longest request is beyond the context."""
    _, most = workload.longest
    if most > context_length:
        raise ValueError(
            f"prompt and answer have up to {most:,} tokens, limit {context_length:,}: the model's "
            "context"
        )


class _Run:
    def __init__(
        self,
        workload: LoadWorkload,
        stubs: Sequence[Stub],
        vocab_size: int,
        timeout_s: float,
        on_change: Callable[[Sample], None],
    ) -> None:
        self._workload = workload
        self._stubs = itertools.cycle(stubs)
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._on_change = on_change
        self.samples: list[Sample] = []

    async def warm_up(self, count: int) -> None:
        """Of lengths as they will come, but with prompts that come no more."""
        for planned in itertools.islice(self._workload.requests(), count):
            message = self._workload.message(planned, self._vocab_size)
            message.token_ids.ids[:] = reversed(message.token_ids.ids)
            async for _ in next(self._stubs).Generate(message, timeout=self._timeout_s):
                pass

    async def to_end(self, stop: asyncio.Event) -> None:
        began_s = time.monotonic()
        requests = self._workload.requests()
        if self._workload.is_open:
            sending = [self._send_when_due(requests, began_s)]
        else:
            assert self._workload.concurrency is not None
            sending = [
                self._send_in_turn(requests, began_s) for _ in range(self._workload.concurrency)
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
                message = self._workload.message(planned, self._vocab_size)
                due_s = began_s + planned.at_s
                # Also where it is late: the answers that have come are read in between.
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._request(planned, message, due_s))

    async def _send_in_turn(self, requests: Iterator[Planned], began_s: float) -> None:
        duration_s = self._workload.duration_s
        for planned in requests:
            now_s = time.monotonic()
            if duration_s is not None and now_s - began_s >= duration_s:
                return
            message = self._workload.message(planned, self._vocab_size)
            await self._request(planned, message, now_s)

    async def _request(
        self, planned: Planned, message: generation_pb2.GenerateRequest, due_s: float
    ) -> None:
        sample = Sample(planned, due_s, time.monotonic())
        self.samples.append(sample)
        self._on_change(sample)
        call = next(self._stubs).Generate(message, timeout=self._timeout_s)
        try:
            async for response in call:
                if response.WhichOneof("event") == "finish":
                    sample.finish = response.finish
                else:
                    count = len(response.delta.token_ids)
                    note_tokens(sample.token_times_s, time.monotonic(), count)
            sample.end(time.monotonic())
        except grpc.aio.AioRpcError as error:
            sample.ended_s = time.monotonic()
            sample.code, sample.error = error.code().name, error.details() or ""
        finally:
            call.cancel()
            self._on_change(sample)
