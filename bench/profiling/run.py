"""measure_profile: starts a pair of workers, measures what a plan needs, and ends them."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from legato.bench.handoff.rates import RatesRun
from legato.bench.handoff.service import running_service
from legato.bench.handoff.two_workers import TwoWorkers
from legato.bench.profiling.streams import ProfiledService, StreamEndedError
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.cluster.text.model_text import ModelText
from legato.cluster.version import legato_version
from legato.plan.profile import (
    DecodePoint,
    HandoffPoint,
    PrefillPoint,
    Profile,
    ProfiledMachine,
    ProfiledWorker,
)
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from legato.bench.profiling.streams import BatchTime

_SIZES_TIMEOUT_S = 600.0
_READY_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0
_JITTER_QUANTILES = 100
_LINK_TOKENS = 1000
_GROWTH = 2.5  # the next length takes so much longer: it is twice as long, and attends to more


@dataclass(frozen=True)
class ProfileWorkload:
    """What is measured, from small to large: what is left when `budget_s` is over is left out, but
    for the first two of each.
    """

    prefill_tokens: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    contexts: tuple[int, ...] = (128, 1024)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    num_repeats: int = 3
    num_steps: int = 32  # of each decode point
    budget_s: float = 120.0


@dataclass(frozen=True)
class ProfiledSettings:
    """As a worker is told them."""

    model: str
    device: str
    dtype: str
    weights: str
    kv_cache: str
    kv_memory_bytes: int
    num_threads: int | None
    max_batch_size: int

    def arguments(self) -> list[str]:
        """Of the worker's command."""
        given = ["--device", self.device, "--dtype", self.dtype, "--weights", self.weights]
        given += ["--kv-cache", self.kv_cache, "--kv-memory", str(self.kv_memory_bytes)]
        given += ["--max-batch-size", str(self.max_batch_size)]
        return given if self.num_threads is None else [*given, "--threads", str(self.num_threads)]


async def measure_profile(
    settings: ProfiledSettings, workload: ProfileWorkload, on_step: Callable[[str], None]
) -> Profile:
    """`on_step` hears in words what is measured next.

    Raises:
        ValueError: the model cannot be used, or its context is too short to be measured.
        RuntimeError: a worker did not start; it has said why on stderr.
        grpc.RpcError: a request failed.
    """
    on_step("loading the model, for its bytes")
    sizes = await _sizes(settings)
    on_step("the link between two workers")
    link_bytes_per_s = await _link(workload.num_repeats)
    on_step("starting a prefill and a decode worker")
    text = ModelText.load(resolve_model(settings.model))
    # A prompt that decode computes itself would be timed as a hand-off.
    options = RouterOptions(port=0, local_prefill_tokens=0)
    async with (
        running_service(settings.model, text, settings.arguments(), options) as address,
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        await _until_ready(channel)
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
        model = await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_CALL_TIMEOUT_S)
        run = _Run(ProfiledService(stub, model), settings, workload, on_step)
        measured = await run.measure()
    return Profile(
        legato_version=legato_version(),
        machine=ProfiledMachine(
            name=sizes["machine"],
            num_cores=sizes["num_cores"],
            memory_bytes=sizes["memory_bytes"],
        ),
        worker=ProfiledWorker(
            model=settings.model,
            device=sizes["device"],
            dtype=settings.dtype,
            weights=settings.weights,
            kv_cache=settings.kv_cache,
            num_threads=settings.num_threads,
            kv_memory_bytes=settings.kv_memory_bytes,
            max_batch_size=settings.max_batch_size,
            context_length=model.context_length,
            block_size=model.block_size,
        ),
        weight_bytes=sizes["weight_bytes"],
        kv_bytes_per_token=sizes["kv_bytes_per_token"],
        link_bytes_per_s=link_bytes_per_s,
        **measured,
    )


class _Run:
    def __init__(
        self,
        service: ProfiledService,
        settings: ProfiledSettings,
        workload: ProfileWorkload,
        on_step: Callable[[str], None],
    ) -> None:
        self._service, self._workload, self._on_step = service, workload, on_step
        self._max_batch_size = settings.max_batch_size
        self._context_length = service.model.context_length
        self._ends_s = time.monotonic() + workload.budget_s
        self._overheads: list[float] = []
        self._prefill: dict[int, float] = {}
        self._jitter: list[float] = []

    async def measure(self) -> dict[str, Any]:
        """The fields of a profile that need the service."""
        await self._service.time_first_gap(32, 16)  # warm: pages, connections, kernels
        prefill = [point async for point in self._prefill_points()]
        if len(self._prefill) < 2:
            raise ValueError(
                f"the context of {self._context_length} tokens is too short to be measured: two "
                f"of {', '.join(map(str, self._workload.prefill_tokens))} tokens must fit"
            )
        handoff = [point async for point in self._handoff_points()]
        decode = [point async for point in self._decode_points()]
        if len({point.num_sequences for point in decode}) < 2:
            raise ValueError(
                "two sizes of decode batches could not be measured: give more KV memory"
            )
        prefill_slowdown, decode_slowdown = await self._slowdowns(decode)
        shares = (np.arange(_JITTER_QUANTILES) + 0.5) / _JITTER_QUANTILES
        jitter = np.quantile(self._jitter, shares)
        return {
            "prefill": prefill,
            "decode": decode,
            "handoff": handoff,
            "request_overhead_s": max(0.0, statistics.median(self._overheads)),
            "step_jitter": [round(float(value), 4) for value in jitter],
            "prefill_slowdown": prefill_slowdown,
            "decode_slowdown": decode_slowdown,
        }

    async def _prefill_points(self) -> AsyncIterator[PrefillPoint]:
        service, repeats = self._service, self._workload.num_repeats
        for num_tokens in self._fitting(self._workload.prefill_tokens, share=0.35, extra=1):
            self._on_step(f"prefill of {num_tokens:,} tokens")
            times = [await service.time_prompt(service.prompt(num_tokens)) for _ in range(repeats)]
            self._overheads += [one.ttft_s - one.model_s for one in times]
            self._prefill[num_tokens] = statistics.median(one.model_s for one in times)
            yield PrefillPoint(
                num_tokens=num_tokens, context_tokens=0, seconds=self._prefill[num_tokens]
            )
        longest = max(self._prefill, default=0)
        num_new = min((n for n in self._prefill if 4 * n >= longest), default=0)
        if not num_new or longest + num_new >= self._context_length:
            return
        self._on_step(f"prefill of {num_new:,} tokens behind {longest:,} cached ones")
        for _ in range(repeats):
            prompt = service.prompt(longest)
            await service.time_prompt(prompt)
            one = await service.time_prompt([*prompt, *service.prompt(num_new)])
            if one.cached_tokens:
                yield PrefillPoint(
                    num_tokens=one.num_tokens,
                    context_tokens=one.cached_tokens,
                    seconds=one.model_s,
                )

    async def _handoff_points(self) -> AsyncIterator[HandoffPoint]:
        steps = self._workload.num_steps
        for num_tokens in self._fitting(tuple(self._prefill), share=0.45, extra=steps + 2):
            self._on_step(f"hand-off of {num_tokens:,} tokens")
            gaps = [
                await self._service.time_first_gap(num_tokens, min(steps, 16))
                for _ in range(self._workload.num_repeats)
            ]
            yield HandoffPoint(num_tokens=num_tokens, seconds=statistics.median(gaps))

    async def _decode_points(self) -> AsyncIterator[DecodePoint]:
        alone_s: float | None = None
        points = [
            (size, context)
            for size in self._workload.batch_sizes
            for context in self._workload.contexts
            if size <= self._max_batch_size
        ]
        # Two sizes are the least that a profile has.
        least = len([x for x in points if x[0] <= self._workload.batch_sizes[1]])
        for number, (size, context) in enumerate(points):
            if number >= least and time.monotonic() > self._ends_s:
                self._on_step(f"the time is over: no more of {size} at once and above")
                return
            found = await self._decode_point(size, context, alone_s)
            if found is None:
                continue
            alone_s = alone_s or found.step_s
            self._jitter += [gap / found.step_s for gap in found.gaps_s]
            yield DecodePoint(
                num_sequences=size,
                context_tokens=round(found.mean_rows),
                seconds=found.step_s,
            )

    async def _decode_point(
        self, size: int, context: int, alone_s: float | None
    ) -> BatchTime | None:
        """None where there is no room for it."""
        max_tokens = self._tokens_until_all_decode(size, context, alone_s)
        while True:
            rows = size * (context + max_tokens)
            if (
                context + max_tokens > self._context_length
                or rows > self._service.model.decode_kv_tokens
            ):
                self._on_step(f"decode of {size} at once behind {context:,} tokens: no room")
                return None
            self._on_step(f"decode of {size} at once behind {context:,} tokens")
            try:
                async with self._service.batch(size, context, max_tokens) as batch:
                    return await batch.measure(self._workload.num_steps)
            except StreamEndedError:  # prompts took longer than when they were measured
                max_tokens *= 2

    def _tokens_until_all_decode(self, size: int, context: int, alone_s: float | None) -> int:
        """What the first stream needs while the others' prompts are computed, and then some."""
        lengths = sorted(self._prefill)
        prefill_s = float(np.interp(context, lengths, [self._prefill[n] for n in lengths]))
        prefill_s *= max(1.0, context / lengths[-1]) ** 2
        waiting = 0 if alone_s is None else int(2 * (size - 1) * prefill_s / alone_s)
        return waiting + 2 * self._workload.num_steps + 16

    async def _slowdowns(self, decode: Sequence[DecodePoint]) -> tuple[float, float]:
        """(of prefill, of decode) while the other is busy, over what each took alone."""
        num_tokens = max(n for n in self._prefill if n <= 512 or n == min(self._prefill))
        point = max(
            (p for p in decode if p.num_sequences <= 8),
            key=lambda p: (p.num_sequences, -p.context_tokens),
        )
        self._on_step("both at once")
        context = point.context_tokens
        room = self._context_length - context - 1
        per_sequence = self._service.model.decode_kv_tokens // point.num_sequences - context - 16
        max_tokens = max(1, min(room, per_sequence))
        prefill: list[float] = []

        async def keep_prefilling() -> None:
            while True:
                one = await self._service.time_prompt(self._service.prompt(num_tokens))
                prefill.append(one.model_s)

        try:
            async with self._service.batch(point.num_sequences, context, max_tokens) as batch:
                busy = asyncio.create_task(keep_prefilling())
                try:
                    found = await batch.measure(2 * self._workload.num_steps)
                finally:
                    busy.cancel()
                    await asyncio.gather(busy, return_exceptions=True)
        except StreamEndedError:  # the context has no room for a batch that lasts
            self._on_step("both at once: not measured, the context is too short")
            return 1.0, 1.0
        prefill_ratio = statistics.median(prefill) / self._prefill[num_tokens] if prefill else 1.0
        return max(1.0, prefill_ratio), max(1.0, statistics.mean(found.gaps_s) / point.seconds)

    def _fitting(self, lengths: Sequence[int], share: float, extra: int) -> Iterator[int]:
        """Those that the context has room for with `extra` tokens more, while there is time."""
        ends_s = self._ends_s - (1 - share) * self._workload.budget_s
        took_s, began_s = 0.0, time.monotonic()
        for number, num_tokens in enumerate(lengths):
            took_s, began_s = time.monotonic() - began_s, time.monotonic()
            if num_tokens + extra > self._context_length:
                return
            if number >= 2 and began_s + _GROWTH * took_s > ends_s:
                self._on_step(
                    f"the time is over: no more prompts of {num_tokens:,} tokens and above"
                )
                return
            yield num_tokens


async def _sizes(settings: ProfiledSettings) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "legato.bench.profiling.sizes", "--model", settings.model),
        *("--device", settings.device, "--dtype", settings.dtype),
        *("--weights", settings.weights, "--kv-cache", settings.kv_cache),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _SIZES_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode().splitlines()
    if not lines:
        raise RuntimeError(f"the model could not be loaded: status {process.returncode}")
    sizes: dict[str, Any] = json.loads(lines[-1])
    if "error" in sizes:
        raise ValueError(sizes["error"])
    return sizes


async def _link(num_repeats: int) -> float:
    """Bytes of KV per second from one process to another, over gRPC."""
    async with TwoWorkers.running("float32", 3 * _LINK_TOKENS) as workers:
        rates = await RatesRun(workers, _LINK_TOKENS, ("grpc",)).measure(num_repeats, ())
    return rates.bytes_per_s["grpc"].median


async def _until_ready(channel: grpc.aio.Channel) -> None:
    """Until the router has heard of both workers."""
    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
    async with asyncio.timeout(_READY_TIMEOUT_S):
        while not (  # noqa: ASYNC110  # the state is remote
            await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
        ).ready:
            await asyncio.sleep(0.05)
