"""SimulatedService: what is simulated: workers and their times, links, routers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.cluster.config import EngineOptions, RouterOptions
from legato.plan.prediction import Slowdown

if TYPE_CHECKING:
    from legato.plan.prediction import WorkerSize
    from legato.plan.step_times import StepTimes

MAX_WORKERS = 4096  # of a pool, as of a plan
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True)
class SimulatedService:
    """`size.max_batch_size` is the largest decode batch. Each worker has a link of its own, over
    which it sends or receives KV.
    """

    times: StepTimes
    size: WorkerSize
    kv_bytes_per_token: int
    link_bytes_per_s: float
    num_prefill: int
    num_decode: int
    num_routers: int = 1
    slowdown: Slowdown = field(default_factory=Slowdown)  # where all workers are on one machine
    mixes_prompts: bool = True  # as decode workers on a CPU do
    options: RouterOptions = field(default_factory=RouterOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "num_routers"):
            if not 1 <= getattr(self, name) <= MAX_WORKERS:
                raise ValueError(
                    f"{name} must be in [1, {MAX_WORKERS:,}], got {getattr(self, name)}"
                )
        if not 0 < self.link_bytes_per_s < float("inf"):
            raise ValueError(f"link_bytes_per_s must be above 0, got {self.link_bytes_per_s}")

    @property
    def num_blocks(self) -> int:
        """KV blocks of each worker."""
        return self.size.kv_rows // self.size.block_size


@dataclass(frozen=True)
class Run:
    """How long is simulated. The first requests fill the service, and the last ones only keep it
    busy until those between have ended: neither are measured.
    """

    num_requests: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 100 <= self.num_requests <= MAX_REQUESTS:
            raise ValueError(
                f"num_requests must be in [100, {MAX_REQUESTS:,}], got {self.num_requests}"
            )

    @property
    def first_measured(self) -> int:
        """The number of the first request that is measured."""
        return self.num_requests // 5

    @property
    def end_measured(self) -> int:
        """The number of the first behind those that are."""
        return self.num_requests - self.num_requests // 10
