"""EngineStats: an engine's gauges and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.worker.local_prefill import LocalPrefill

if TYPE_CHECKING:
    from legato.worker.scheduling.step import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """As they stood at one moment."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    steps: int = 0  # forward passes
    tokens: int = 0
    model_s: float = 0.0  # of the steps
    num_swapped: int = 0  # sequences whose KV is in the host's memory
    num_preemptions: int = 0  # sequences that had to yield, swapped or returned; so far
    num_returned: int = 0  # of these, those that have left to be computed anew elsewhere
    # A part of the steps and tokens; decode only.
    local_prefill: LocalPrefill = field(default_factory=LocalPrefill)

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        *,
        steps: int,
        tokens: int,
        model_s: float,
        num_returned: int,
        local_prefill: LocalPrefill,
    ) -> EngineStats:
        """With the counters that only the engine knows."""
        return cls(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            waiting_tokens=scheduler.num_waiting_tokens,
            steps=steps,
            tokens=tokens,
            model_s=model_s,
            num_swapped=scheduler.num_swapped,
            num_preemptions=scheduler.num_preemptions,
            num_returned=num_returned,
            local_prefill=local_prefill,
        )
