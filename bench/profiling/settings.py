"""ProfileWorkload, ProfiledSettings: what is measured, and of which worker."""

from __future__ import annotations

from dataclasses import dataclass


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
