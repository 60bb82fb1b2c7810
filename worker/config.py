"""WorkerConfig: everything a worker process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from legato.protos.internal_access import ANYBODY, InternalAccess

Role = Literal["prefill", "decode", "colocated"]  # the last computes prompts and decodes
Admission = Literal["expected", "reserve"]
KvLane = Literal["auto", "grpc"]
KV_WIRES = ("same", "float32", "bfloat16", "float16", "int8", "fp8")
WEIGHTS = (
    "auto",  # as the checkpoint has them, GGUF's blocks in the dtype
    "keep",  # GGUF's blocks too
    "int8",
    "int4",  # int4-g64
    "int4-g64",
    "int4-g128",
    "int4-g64-sym",
    "int4-g128-sym",
)


@dataclass(frozen=True)
class WorkerConfig:
    """Frozen and complete. `host` is loopback unless the operator says otherwise."""

    model: str  # a folder, a .gguf file, a hub id or demo
    role: Role
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16; auto is float32 on a CPU
    deterministic: bool = False  # plain products too have one order of sums for every batch
    kv_cache: str = "auto"  # auto, fp8, int8; auto is the dtype of the weights
    # auto: through shared memory to receivers on this host; grpc: never.
    kv_lane: KvLane = "auto"
    kv_wire: str = "same"  # what KV is sent as: one of KV_WIRES; same is the dtype of the pages
    weights: str = "auto"  # of the matrices: one of WEIGHTS
    kv_memory_bytes: int = 1 << 30
    # In (0, 1]: of what is free after the weights and a measured step, instead of the bytes.
    kv_memory_fraction: float | None = None
    # For the KV of preempted sequences (not in prefill). None: as much as the pool, and at most a
    # quarter of the machine's memory; 0: off.
    swap_memory_bytes: int | None = None
    admission: Admission = "expected"  # see `scheduling.claim.AdmissionMode`
    admission_risk: float = 0.7  # see `scheduling.claim.AdmissionRule`
    block_size: int = 16
    # Most prompt tokens of one prefill forward; in colocated, of one that decodes nothing.
    prefill_chunk_tokens: int = 2048
    otlp_endpoint: str | None = None  # a collector that is told of what routers trace
    prefix_cache: bool = True  # keep the KV of prompts' beginnings while there is room
    max_batch_size: int = 256  # most sequences of one decode forward
    context_length: int | None = None  # lowers the model's own limit
    num_threads: int | None = None  # of torch; None: torch's default
    # Who may call, and how other workers are called; by default anybody.
    access: InternalAccess = ANYBODY

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"role must be {' or '.join(get_args(Role))}, got {self.role!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("kv_memory_bytes", "block_size", "prefill_chunk_tokens", "max_batch_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("context_length", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"kv_memory_fraction must be in (0, 1], got {fraction}")
        if self.swap_memory_bytes is not None and self.swap_memory_bytes < 0:
            raise ValueError(f"swap_memory_bytes must be at least 0, got {self.swap_memory_bytes}")
        if self.admission not in get_args(Admission):
            raise ValueError(f"admission must be expected or reserve, got {self.admission!r}")
        if not 0 <= self.admission_risk < 1:
            raise ValueError(f"admission_risk must be in [0, 1), got {self.admission_risk}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        if self.kv_cache not in ("auto", "fp8", "int8"):
            raise ValueError(f"kv_cache must be auto, fp8 or int8, got {self.kv_cache!r}")
        if self.kv_lane not in get_args(KvLane):
            raise ValueError(f"kv_lane must be auto or grpc, got {self.kv_lane!r}")
        if self.kv_wire not in KV_WIRES:
            raise ValueError(f"kv_wire must be one of {', '.join(KV_WIRES)}, got {self.kv_wire!r}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
