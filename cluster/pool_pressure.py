"""PrefillPressure, DecodePressure: what the scaling rules know of a pool, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolSize:
    """How many workers of a pool there are, by the controller's word."""

    target: int
    ready: int
    starting: int = 0

    @property
    def settled(self) -> bool:
        """True where none is on its way: what is measured is what the target gives."""
        return self.starting == 0 and self.ready >= self.target


@dataclass(frozen=True)
class PrefillPressure:
    """Of ready workers; those that drain count no more."""

    size: PoolSize
    waiting_requests: int = 0  # in the routers' queues, for a prefill worker
    waiting_tokens: int = 0  # of their prompts, and of those sent and not begun
    worker_tokens_per_s: float | None = None  # of one worker while it computes; None: not known yet
    busy_workers: float = 0.0  # their shares of time in a step, summed: from 0 to `size.ready`
    ttft_p90_s: float | None = None  # None: no request began within the window
    idlest: str = ""  # the worker id to part with first


@dataclass(frozen=True)
class DecodePressure:
    """Of ready workers; those that drain count no more. Workers of a pool are alike."""

    size: PoolSize
    waiting_requests: int = 0  # in the routers' queues, for room in decode
    waiting_blocks: int = 0  # that these take to begin with
    used_blocks: int = 0  # of live sequences, promised ones, and those in the host's memory
    total_blocks: int = 0  # 0: no worker has reported yet
    running: int = 0  # sequences in batches
    itl_s: float | None = None  # mean; None: no token came within the window
    idlest: str = ""  # the worker id to part with first
