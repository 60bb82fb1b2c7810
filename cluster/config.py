"""ServiceConfig: what `legato serve` is told, frozen and complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Admission = Literal["expected", "reserve"]
KvLane = Literal["auto", "grpc"]
# As in `legato.worker.config`, which says what they are.
KV_WIRES = ("same", "float32", "bfloat16", "float16", "int8", "fp8")
WEIGHTS = (
    "auto",
    "keep",
    "int8",
    "int4",
    "int4-g64",
    "int4-g128",
    "int4-g64-sym",
    "int4-g128-sym",
)


@dataclass(frozen=True)
class EngineOptions:
    """Passed on to every worker; see `legato.worker.config.WorkerConfig` for their meaning."""

    device: str = "auto"
    dtype: str = "auto"
    kv_cache: str = "auto"
    kv_lane: KvLane = "auto"
    kv_wire: str = "same"
    deterministic: bool = False
    weights: str = "auto"
    kv_memory_bytes: int = 1 << 30
    # Of the workers on one machine or GPU together: each takes its equal part.
    kv_memory_fraction: float | None = None
    swap_memory_bytes: int | None = None
    admission: Admission = "expected"
    admission_risk: float = 0.7
    block_size: int = 16
    prefill_chunk_tokens: int = 2048
    prefix_cache: bool = True
    max_batch_size: int = 256
    context_length: int | None = None
    num_threads: int | None = None


@dataclass(frozen=True)
class RouterOptions:
    """Bounds of the router; times in seconds."""

    host: str = "127.0.0.1"
    port: int = 50051
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20  # prompt tokens of all queued requests
    # A request without a deadline still ends: nothing may wait for ever.
    default_deadline_s: float = 600.0
    # No report of a worker for this long: it hangs, and is left out.
    worker_silence_s: float = 2.0
    # How often a request may be moved to other workers after a loss.
    max_attempts: int = 4
    # A small request may pass a blocked bigger one until that one has waited this long.
    max_passed_over_s: float = 2.0
    # No worker of a role for this long: a request that needs one fails with UNAVAILABLE.
    worker_wait_s: float = 30.0
    # Prompt tokens without KV on the decode worker that it may compute itself, where that costs
    # less than prefill elsewhere and the hand-off; 0 is off.
    local_prefill_tokens: int = 128


@dataclass(frozen=True)
class ServiceConfig:
    """One service: a model, two pools, one router or more."""

    model: str
    prefill_workers: int = 1
    decode_workers: int = 1
    ray_address: str | None = None  # None: a local Ray of our own
    # Where workers listen: an address, or "auto": loopback, or, where the Ray cluster has more
    # than one node, each node's own address.
    worker_host: str = "auto"
    # Ray resources a worker asks for. None: nothing on a Ray of our own, else one CPU;
    # and one GPU where the device is cuda.
    worker_cpus: float | None = None
    worker_gpus: float | None = None
    start_timeout_s: float = 120.0
    # On the ports from `router.port` on, or on any free ones where that is 0.
    num_routers: int = 1
    engine: EngineOptions = EngineOptions()
    # Of the decode workers, where they differ from `engine`: see `legato.protos.kv_fit`.
    decode_dtype: str | None = None
    decode_kv_cache: str | None = None
    router: RouterOptions = RouterOptions()

    def decode_engine(self) -> EngineOptions:
        """What decode workers are told; `engine` is for the prefill workers."""
        return replace(
            self.engine,
            dtype=self.decode_dtype or self.engine.dtype,
            kv_cache=self.decode_kv_cache or self.engine.kv_cache,
        )
