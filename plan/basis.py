"""Basis: what a plan stands on: a measured profile, or a datasheet and a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from legato.plan import datasheets
from legato.plan.datasheets import datasheet
from legato.plan.model_files import WEIGHTS, read_model
from legato.plan.prediction import Slowdown, WorkerSize
from legato.plan.service_file import PlannedWorker
from legato.plan.step_times import MeasuredTimes, RooflineTimes
from legato.worker.loading import DTYPES

if TYPE_CHECKING:
    from legato.plan.profile import Profile
    from legato.plan.step_times import StepTimes

DEFAULT_LINK_BYTES_PER_S = 100e9 / 8
DEFAULT_BATCH_SIZE = 256
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Basis:
    """`text` says where the figures are from, and what is assumed."""

    times: StepTimes
    size: WorkerSize
    worker: PlannedWorker
    kv_bytes_per_token: int
    link_bytes_per_s: float  # of KV, from and to a worker
    slowdown: Slowdown | None  # of pools that share a machine; None: nobody measured it
    text: str


def profile_basis(
    profile: Profile, kv_memory_bytes: int | None, max_batch_size: int | None
) -> Basis:
    """The workers that were measured; with other memory or another batch where these are given."""
    measured = profile.worker
    kv_bytes = kv_memory_bytes or measured.kv_memory_bytes
    text = (
        f"a profile of {measured.model} on {profile.machine.name}, measured with batches of up to "
        f"{max(p.num_sequences for p in profile.decode)} and prompts of up to "
        f"{max(p.num_tokens for p in profile.prefill):,} tokens; what is beyond is drawn on"
    )
    worker = PlannedWorker(
        model=measured.model,
        device=measured.device,
        dtype=measured.dtype,
        weights=measured.weights,
        kv_cache=measured.kv_cache,
        kv_memory_bytes=kv_bytes,
        num_threads=measured.num_threads,
    )
    return Basis(
        times=MeasuredTimes(profile),
        size=WorkerSize(
            kv_bytes // profile.kv_bytes_per_token,
            max_batch_size or measured.max_batch_size,
            measured.block_size,
        ),
        worker=worker,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        link_bytes_per_s=profile.link_bytes_per_s,
        slowdown=Slowdown(profile.prefill_slowdown, profile.decode_slowdown),
        text=text,
    )


def datasheet_basis(
    gpu: str,
    model: str,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    kv_cache: str = "auto",
    link_bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S,
    kv_memory_bytes: int | None = None,
    max_batch_size: int | None = None,
) -> Basis:
    """One worker a GPU.

    Raises:
        ValueError: an unknown GPU or setting, a model that cannot be read, or that does not fit.
    """
    for name, value, known in (
        ("dtype", dtype, ("auto", *DTYPES)),
        ("weights", weights, WEIGHTS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    sheet = datasheet(gpu)
    shape = read_model(model, dtype, weights, kv_cache)
    cost = shape.cost
    usable = sheet.memory_bytes * datasheets.MEMORY_SHARE - datasheets.ACTIVATION_BYTES
    left = int(usable - cost.weight_bytes - shape.embedding_bytes)
    kv_bytes = kv_memory_bytes or left
    if kv_bytes > left or left < BLOCK_SIZE * cost.kv_bytes_per_token:
        raise ValueError(
            f"{sheet.name} has {usable / 1e9:.0f} GB for a worker, the weights take "
            f"{(cost.weight_bytes + shape.embedding_bytes) / 1e9:.1f} GB of it, and "
            f"{kv_bytes / 1e9:.1f} GB of KV do not fit beside them: a worker has one GPU; take "
            "a larger one, --weights int8, or less --kv-memory"
        )
    text = (
        f"the datasheet of {sheet.name} ({sheet.source}): {sheet.flops_per_s / 1e12:g} TFLOP/s of "
        f"which {datasheets.PREFILL_SHARE:.0%}, {sheet.bytes_per_s / 1e9:g} GB/s of which "
        f"{datasheets.DECODE_SHARE:.0%}, {sheet.memory_bytes / 1e9:g} GB of which "
        f"{datasheets.MEMORY_SHARE:.0%} are counted on; {link_bytes_per_s * 8 / 1e9:g} Gbit/s "
        "of link; nothing of it is measured"
    )
    # A service is given the folder: a config.json alone has nothing to serve.
    folder = str(Path(model).parent) if model.endswith(".json") else model
    planned = PlannedWorker(folder, "cuda", shape.dtype, weights, kv_cache, kv_bytes, None)
    return Basis(
        times=RooflineTimes.of(cost, sheet, link_bytes_per_s),
        size=WorkerSize(
            kv_bytes // cost.kv_bytes_per_token, max_batch_size or DEFAULT_BATCH_SIZE, BLOCK_SIZE
        ),
        worker=planned,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        link_bytes_per_s=link_bytes_per_s,
        slowdown=None,
        text=text,
    )
