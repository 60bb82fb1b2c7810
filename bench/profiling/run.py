"""measure_profile: starts a pair of workers, measures what a plan needs, and ends them."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import grpc

from legato.bench.handoff.rates import RatesRun
from legato.bench.handoff.service import running_service, until_ready
from legato.bench.handoff.two_workers import TwoWorkers
from legato.bench.profiling.points import ProfilePoints
from legato.bench.profiling.streams import ProfiledService
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.cluster.text.model_text import ModelText
from legato.cluster.version import legato_version
from legato.plan.profile import Profile, ProfiledMachine, ProfiledWorker
from legato.protos import generation_pb2, generation_pb2_grpc
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.bench.profiling.settings import ProfiledSettings, ProfileWorkload

_SIZES_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 10.0
_LINK_TOKENS = 1000


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
        await until_ready(channel)
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
        model = await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_CALL_TIMEOUT_S)
        points = ProfilePoints(ProfiledService(stub, model), settings, workload, on_step)
        measured = await points.measure()
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
