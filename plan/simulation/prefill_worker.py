"""PrefillWorker: the production prefill scheduler and block pool of one simulated worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.plan.simulation.engine import SimulatedEngine
from legato.plan.simulation.link import Link
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.kv.block_pool import BlockPool
from legato.worker.load import worker_load
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.scheduling.step import Step
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.plan.simulation.engine import PoolBusy
    from legato.plan.simulation.measures import Measures
    from legato.plan.simulation.setup import SimulatedService
    from legato.plan.simulation.step_table import StepTable
    from legato.protos import common_pb2


@dataclass(frozen=True)
class FirstToken:
    """What a prompt took until it was computed."""

    at_s: float
    wait_s: float
    model_s: float


class PrefillWorker(SimulatedEngine[Step]):
    """Prompts in, first tokens out; whoever gave a prompt gives its blocks back."""

    def __init__(
        self,
        worker_id: str,
        service: SimulatedService,
        table: StepTable,
        measures: Measures,
        own: PoolBusy,
        other: PoolBusy,
    ) -> None:
        self.worker_id = worker_id
        self.link = Link()
        self._pool = BlockPool(service.num_blocks)
        scheduler = PrefillScheduler(
            self._pool, service.size.block_size, service.engine.prefill_chunk_tokens
        )
        super().__init__(asyncio.get_running_loop(), scheduler, measures, own)
        self._prefill = scheduler
        self._table = table
        self._other = other
        self._slowdown = service.slowdown.prefill
        self._firsts: dict[Sequence, asyncio.Future[FirstToken]] = {}
        self._transfers = TransferCounters()

    def compute(self, token_ids: list[int], max_tokens: int) -> Sequence:
        """Queues a prompt; `first_token` tells when it is computed, `release` frees its blocks."""
        params = SamplingParams.greedy_for(max_tokens, ignore_eos=True)
        sequence = Sequence(token_ids, len(token_ids), params, frozenset())
        self._firsts[sequence] = self._loop.create_future()
        self.submit(sequence)
        return sequence

    async def first_token(self, sequence: Sequence) -> FirstToken:
        """Waits for it."""
        return await self._firsts[sequence]

    def release(self, sequence: Sequence) -> None:
        """Its KV is elsewhere, or not needed any more."""
        self._firsts.pop(sequence, None)

        def free() -> None:
            self._prefill.remove(sequence)
            if sequence.lease is not None:
                sequence.lease.release()

        self.tell(free)

    def load(self) -> common_pb2.WorkerLoad:
        """The report of now."""
        return worker_load(
            "prefill",
            self._pool.usage(),
            self._pool.counters(),
            self.stats(counts_prompts=True),
            self._transfers,
            0,
            None,
            now_s=self._loop.time(),
        )

    def _schedule(self, now: float) -> Step | None:
        return self._prefill.schedule(now)

    def _seconds(self, step: Step) -> float:
        return self._table.prefill_s(step) * self._other.slowed(self._slowdown)

    def _finish(self, step: Step, seconds: float) -> None:
        sampled = [part.sequence for part in step.parts if part.samples]
        self._prefill.commit(step)
        self._prefill.settle(step)
        for part in step.parts:
            part.sequence.model_s += seconds
        now = self._loop.time()
        for sequence in sampled:
            assert sequence.first_step_at_s is not None, "a step has computed it"
            wait_s = sequence.first_step_at_s - sequence.submitted_at_s
            waiter = self._firsts.get(sequence)
            if waiter is not None and not waiter.done():
                waiter.set_result(FirstToken(now, wait_s, sequence.model_s))
