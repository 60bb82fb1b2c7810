"""DecodeWorker: production tickets, ledger, block pool and scheduler of one simulated worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.plan.simulation.engine import SimulatedEngine
from legato.plan.simulation.link import Link
from legato.worker.handoff.room_notes import RoomNotes
from legato.worker.handoff.tickets import TicketBook
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.kv.block_pool import BlockPool
from legato.worker.load import worker_load
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule
from legato.worker.scheduling.decision import Decision

if TYPE_CHECKING:
    from legato.plan.simulation.engine import PoolBusy
    from legato.plan.simulation.measures import Measures
    from legato.plan.simulation.setup import SimulatedService
    from legato.plan.simulation.step_table import StepTable
    from legato.protos import common_pb2
    from legato.worker.scheduling.claim import Newcomer
    from legato.worker.sequence import Sequence


class Left(Enum):
    """Why an answer is on the worker no more."""

    ENDED = auto()
    PREEMPTED = auto()  # it goes on elsewhere, from its tokens


@dataclass(eq=False)
class Stay:
    """One answer on a decode worker."""

    sequence: Sequence
    last_token_s: float | None  # None: its first is still to come
    joined: asyncio.Future[float] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    first: asyncio.Future[float] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    left: asyncio.Future[Left] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class DecodeWorker(SimulatedEngine[Decision]):
    """Between steps the tickets change, as they do by the worker's event loop."""

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
        loop, engine = asyncio.get_running_loop(), service.engine
        self.pool = BlockPool(service.num_blocks)
        # By default as much host memory as KV memory.
        self._host_pool = BlockPool(service.num_blocks)
        rule = AdmissionRule(AdmissionMode(engine.admission), engine.admission_risk)
        ledger = CapacityLedger(self.pool, service.size.block_size, rule)
        scheduler = CapacityScheduler(
            self.pool,
            ledger,
            service.size.max_batch_size,
            self._host_pool,
            mixes_prompts=service.mixes_prompts,
        )
        super().__init__(loop, scheduler, measures, own)
        self._decode = scheduler
        notes = RoomNotes(self, lambda: self.tickets.wanted(), loop)  # type: ignore[arg-type]  # what it uses of an engine
        self.tickets = TicketBook(
            self.pool,
            ledger,
            block_size=service.size.block_size,
            on_change=notes.tell,
            now=loop.time,
        )
        self._table = table
        self._other = other
        self._slowdown = service.slowdown.decode
        self._stays: dict[Sequence, Stay] = {}
        self._last_end_s = -1.0
        self._transfers = TransferCounters()
        # Integrals over the time that is measured.
        self.held_block_s = 0.0
        self.sequence_s = 0.0
        self._held = self._running = 0
        self._noted_at_s = 0.0

    @property
    def num_preemptions(self) -> int:
        """So far."""
        return self._decode.num_preemptions

    def note_waiting(self, wanted: list[Newcomer]) -> None:
        """As `Engine.note_waiting`."""
        self.tell(lambda: self._decode.note_waiting(wanted))

    def enter(self, stay: Stay) -> None:
        """An answer whose rows are here, or are to be computed here."""
        self._stays[stay.sequence] = stay
        self.submit(stay.sequence)

    def load(self) -> common_pb2.WorkerLoad:
        """The report of now."""
        return worker_load(
            "decode",
            self.pool.usage(),
            self.pool.counters(),
            self.stats(counts_prompts=False),
            self._transfers,
            self.tickets.num_landing,
            self._host_pool.usage(),
            now_s=self._loop.time(),
        )

    def note_usage(self) -> None:
        """Adds up what was held since the last call."""
        now = self._loop.time()
        seconds = self._measures.measured_s(self._noted_at_s, now)
        self.held_block_s += seconds * self._held
        self.sequence_s += seconds * self._running
        self._noted_at_s = now
        self._held, self._running = self.pool.usage().held, self._decode.num_running

    def _note_joined(self, sequence: Sequence) -> None:
        self._stays[sequence].joined.set_result(self._loop.time())

    def _schedule(self, now: float) -> Decision | None:
        decision = self._decode.schedule(now)
        self.note_usage()
        return decision

    def _seconds(self, step: Decision) -> float:
        return self._table.decode_s(step) * self._other.slowed(self._slowdown)

    def _finish(self, step: Decision, seconds: float) -> None:
        parts = step.parts
        if step.prompt_parts:  # of these, some reach no token yet
            sampled = [part.sequence for part in parts if part.samples]
            self._local = self._local.after(step.num_prompt_tokens, seconds, self._loop.time())
        else:
            sampled = [part.sequence for part in parts]
        self._decode.commit(step)
        self._decode.settle(step)
        for part in step.prompt_parts:
            part.sequence.model_s += seconds
        now, before = self._loop.time(), self._last_end_s
        regular, stays = 0, self._stays
        for sequence in sampled:
            stay = stays[sequence]
            if stay.last_token_s == before:
                regular += 1
            elif stay.last_token_s is None:
                stay.first.set_result(now)
            else:
                self._measures.note_gaps(now, now - stay.last_token_s, 1)
            stay.last_token_s = now
            if sequence.append(0) is not None:
                self._decode.remove(sequence)
                self._leave(sequence, Left.ENDED)
        if regular:
            self._measures.note_gaps(now, now - before, regular)
        self._last_end_s = now
        for sequence in step.returned:
            self._num_returned += 1
            self._leave(sequence, Left.PREEMPTED)

    def _leave(self, sequence: Sequence, why: Left) -> None:
        stay = self._stays.pop(sequence)
        if sequence.lease is not None:
            sequence.lease.release()
        if not stay.left.done():
            stay.left.set_result(why)
