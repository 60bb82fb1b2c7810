"""Report: the figures of one simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.bench.simulation.answer import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.simulation.answer import Answer
    from legato.worker.kv.block_pool import PoolUsage
    from legato.worker.scheduling.capacity_decode import CapacityScheduler
    from legato.worker.scheduling.decision import Decision


@dataclass
class Report:
    """Filled while the run goes on."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    returned: int = 0
    blocks_moved: int = 0  # between the pool and the host's memory, both ways
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    max_preemptions: int = 0  # of one answer
    identity: str = ""  # SHA-256 of the log
    occupancy: list[float] = field(default_factory=list)  # of each step
    end_s: float = 0.0

    def note_step(
        self, usage: PoolUsage, decision: Decision, scheduler: CapacityScheduler, step_s: float
    ) -> None:
        """One decision."""
        self.steps += 1
        self.end_s += step_s
        self.tokens += sum(part.samples for part in decision.parts)
        self.returned += len(decision.returned)
        self.blocks_moved += sum(len(out.blocks) for out in decision.swap_outs)
        self.blocks_moved += sum(len(back.blocks) for back in decision.swap_ins)
        self.occupancy.append(usage.held / usage.total)

    def finish(self, answers: Sequence[Answer], preemptions: int, identity: str) -> None:
        """The run is over."""
        outcomes = [answer.outcome for answer in answers]
        self.finished = outcomes.count(Outcome.FINISHED)
        self.cancelled = outcomes.count(Outcome.CANCELLED)
        self.refused = outcomes.count(Outcome.REFUSED)
        self.preemptions = preemptions
        self.max_preemptions = max((a.num_preemptions for a in answers), default=0)
        self.identity = identity

    @property
    def mean_occupancy(self) -> float:
        """Held share of the pool, over the middle of the run: neither filling nor emptying."""
        first, last = len(self.occupancy) // 10, len(self.occupancy) * 8 // 10
        middle = self.occupancy[first:last] or [0.0]
        return sum(middle) / len(middle)
