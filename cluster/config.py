"""ServiceConfig: what `legato serve` is told, frozen and complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from legato.cluster.resource_demand import NO_DEMAND, ResourceDemand
from legato.protos.internal_access import ANYBODY, InternalAccess

if TYPE_CHECKING:
    from legato.cluster.autoscale_options import AutoscaleOptions
    from legato.cluster.control_plane import Role
    from legato.protos.tls_files import TlsFiles

Admission = Literal["expected", "reserve"]
KvLane = Literal["auto", "grpc"]
ADMISSIONS: tuple[Admission, ...] = ("expected", "reserve")
KV_LANES: tuple[KvLane, ...] = ("auto", "grpc")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHES = ("auto", "fp8", "int8")
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
    otlp_endpoint: str | None = None
    max_batch_size: int = 256
    context_length: int | None = None
    num_threads: int | None = None


@dataclass(frozen=True)
class RouterOptions:
    """Bounds of the router; times in seconds."""

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None  # of the OpenAI-compatible endpoint; None: there is none
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20  # prompt tokens of all queued requests
    # A request without a deadline still ends: nothing may wait for ever.
    default_deadline_s: float = 600.0
    # No report of a worker for this long: it hangs, and is left out.
    worker_silence_s: float = 2.0
    # So many losses of workers that may have been a request's own doing (see `blame`), or
    # so many refusals in a row, end it.
    max_attempts: int = 4
    # A small request may pass a blocked bigger one until that one has waited this long.
    max_passed_over_s: float = 2.0
    # No worker of a role for this long: a request that needs one fails with UNAVAILABLE, unless its
    # client has set a deadline: then it waits until that is near.
    worker_wait_s: float = 30.0
    # Prompt tokens without KV on the decode worker that it may compute itself, where that costs
    # less than prefill elsewhere and the hand-off; 0 is off.
    local_prefill_tokens: int = 128
    # A file for lines about every request; see docs/operations.md.
    request_log: str | None = None
    # An OTLP collector that is told of requests; the share is of those whose clients do not say.
    otlp_endpoint: str | None = None
    trace_share: float = 1.0
    tls: TlsFiles | None = None  # of the public port; with a CA clients need a certificate of it
    token_file: str | None = None  # clients need one of its tokens: see `credentials`
    access: InternalAccess = ANYBODY  # to the workers
    reports_load: bool = False  # to the controller, once a second: where the pools are autoscaled


@dataclass(frozen=True)
class ServiceConfig:
    """One service: a model, its pools, one router or more."""

    model: str
    served_model_name: str | None = None  # by which clients know it; None: `model`
    prefill_workers: int = 1
    decode_workers: int = 1
    colocated_workers: int = 0  # compute prompts and decode
    ray_address: str | None = None  # None: a local Ray of our own
    await_nodes: int = 0  # of a joined cluster, before anything is placed
    # Where workers listen: an address, or "auto": loopback, or, where the Ray cluster has more
    # than one node, each node's own address.
    worker_host: str = "auto"
    # Ray resources a worker asks for. None: nothing on a Ray of our own, else one CPU;
    # and one GPU where the device is cuda.
    worker_cpus: float | None = None
    worker_gpus: float | None = None
    # Of the workers of one role; what it says of CPUs and GPUs goes before the two above.
    prefill_resources: ResourceDemand = NO_DEMAND
    decode_resources: ResourceDemand = NO_DEMAND
    colocated_resources: ResourceDemand = NO_DEMAND
    start_timeout_s: float = 120.0
    restart: bool = True  # replace workers that are lost
    # On the ports from `router.port` on, or on any free ones where that is 0.
    num_routers: int = 1
    engine: EngineOptions = EngineOptions()
    # Of the decode workers, where they differ from `engine`: see `legato.protos.kv_fit`.
    decode_dtype: str | None = None
    decode_kv_cache: str | None = None
    router: RouterOptions = RouterOptions()
    autoscale: AutoscaleOptions | None = None
    # Of the workers, where `router.tls` has a CA; None: the same pair.
    worker_tls: TlsFiles | None = None
    allow_plain_token: bool = False  # from other machines, without TLS

    @property
    def public_model_name(self) -> str:
        """By which clients know the model."""
        return self.served_model_name or self.model

    @property
    def pool_sizes(self) -> dict[Role, int]:
        """How many workers each pool begins with."""
        return {
            "prefill": self.prefill_workers,
            "decode": self.decode_workers,
            "colocated": self.colocated_workers,
        }

    @property
    def resources(self) -> dict[Role, ResourceDemand]:
        """What is said of the workers of each role."""
        return {
            "prefill": self.prefill_resources,
            "decode": self.decode_resources,
            "colocated": self.colocated_resources,
        }

    @property
    def num_workers(self) -> int:
        """Of all pools."""
        return sum(self.pool_sizes.values())

    @property
    def asks_cpus(self) -> bool:
        """Whether workers ask for CPUs on a Ray of our own too."""
        return any((self.worker_cpus, *(asked.cpus for asked in self.resources.values())))

    def decode_engine(self) -> EngineOptions:
        """What decode workers are told; `engine` is for the others."""
        return replace(
            self.engine,
            dtype=self.decode_dtype or self.engine.dtype,
            kv_cache=self.decode_kv_cache or self.engine.kv_cache,
        )
