"""Lab: the loaded model that experiments share, and the machine's limits measured beside them."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.decode_curve.capacity_engine import CapacityEngine
from legato.bench.experiments.experiment import CannotMeasureError
from legato.bench.experiments.passes import Passes
from legato.bench.limits import measure_limits
from legato.worker.config import WorkerConfig
from legato.worker.device_memory import free_bytes
from legato.worker.loading import choose_device

if TYPE_CHECKING:
    from legato.bench.limits import Limits, Rate

KV_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class LabSettings:
    """What is measured, and with how much of the machine."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int = 1

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")


class Lab:
    """The model is loaded when it is first asked for."""

    def __init__(self, settings: LabSettings) -> None:
        self.settings = settings
        self.limits: list[Limits] = []  # all that were measured, in order
        self._engine: CapacityEngine | None = None
        self._passes: Passes | None = None

    @property
    def engine(self) -> CapacityEngine:
        """With the weights as they are stored, and a pool that passes have room in.

        Raises:
            ValueError: the model cannot be loaded.
        """
        if self._engine is None:
            self._engine = self.load("auto")
        return self._engine

    @property
    def passes(self) -> Passes:
        """Of that engine."""
        if self._passes is None:
            self._passes = Passes(self.engine)
        return self._passes

    def load(self, weights: str) -> CapacityEngine:
        """Another copy of the model.

        Raises:
            ValueError: it cannot be loaded in this form.
        """
        config = WorkerConfig(
            model=self.settings.model,
            role="decode",
            device=self.settings.device,
            dtype=self.settings.dtype,
            weights=weights,
            kv_memory_bytes=KV_MEMORY_BYTES,
            num_threads=self.settings.num_threads,
        )
        return CapacityEngine(config, num_slots=0)

    def measure_limits(self) -> Limits:
        """Of this moment; about a second."""
        device = choose_device(self.settings.device)
        found = measure_limits(self.settings.num_threads, device, num_tries=3)
        self.limits.append(found)
        return found

    def peak(self, limits: Limits) -> Rate | None:
        """Of matrix products in the dtype that the engine multiplies in; None: there is none."""
        return limits.matmul_ops_per_s.get(self.engine.product_dtype)

    def release(self) -> None:
        """Gives the model back; it is loaded again when it is asked for."""
        self._engine = self._passes = None
        gc.collect()

    def check_room(self, num_copies: int) -> None:
        """Raises CannotMeasureError where memory has no room for so many workers more."""
        wanted = num_copies * (2 * self.engine.cost.weight_bytes + (512 << 20))
        free = free_bytes(self.engine.device)
        if wanted > free:
            raise CannotMeasureError(
                f"{num_copies} workers of this model take about {wanted >> 20:,} MiB, and "
                f"{free >> 20:,} MiB of memory are free"
            )


def usable_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))
