"""Invariants: what must hold at every step of a simulated run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from legato.bench.simulation.answer import Outcome
from legato.worker.kv.block_pool import blocks_for
from legato.worker.priority import Priority
from legato.worker.scheduling.claim import AdmissionMode
from legato.worker.scheduling.prompt_pieces import APART_TOKENS, MIXED_TOKENS
from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from legato.bench.simulation.queue import Entry
    from legato.bench.simulation.worker import DecodeWorkerSimulation
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.scheduling.decision import Decision
    from legato.worker.sequence import Sequence


class Invariants:
    """Works them out anew, from what the simulation knows, not from the scheduler's own books."""

    def __init__(self, simulation: DecodeWorkerSimulation) -> None:
        self._simulation = simulation
        self._block_size = simulation.workload.block_size
        self._max_preemptions = simulation.ledger.rule.max_preemptions
        self._residents: dict[Sequence, tuple[tuple[int, int], bool]] = {}
        self._highest_elsewhere = Priority.BATCH
        self._ever_preempted = 0

    def check(self) -> None:
        """Between two steps."""
        simulation = self._simulation
        simulation.pool.check_integrity()
        if simulation.host_pool is not None:
            simulation.host_pool.check_integrity()
        self._check_references()
        self._check_rows()
        claims = {a.claim for a in simulation.answers if a.claim is not None}
        claims.update(simulation.leaving.values())
        promised = sum(claim.promised for claim in claims if not claim.withdrawn)
        assert simulation.pool.usage().reserved == promised, "a promise is lost"

    def check_decision(self, decision: Decision) -> None:
        """Who yields is who should; nobody writes where another reads."""
        simulation = self._simulation
        victims = {out.sequence for out in decision.swap_outs} | set(decision.returned)
        if simulation.workload.mode is AdmissionMode.RESERVE:
            assert not victims, "promised its room, and preempted"
        self._check_victims(victims)
        written: list[int] = []
        for part in decision.parts:
            blocks = part.sequence.lease.blocks if part.sequence.lease is not None else []
            first = part.sequence.num_computed // self._block_size
            end = blocks_for(part.sequence.num_computed + part.num_tokens, self._block_size)
            assert end <= len(blocks), "no block for the row to be written"
            written += blocks[first:end]
        assert decision.num_prompt_tokens <= APART_TOKENS, "a step is too long for the others"
        users = Counter(
            block
            for sequence in simulation.here
            if sequence.lease is not None and sequence.state is not SequenceState.DONE
            for block in sequence.lease.blocks
        )
        assert all(users[block] == 1 for block in written), "writes where another reads"
        assert len(decision.parts) <= simulation.workload.max_batch_size
        self._ever_preempted += len(victims)
        # Over 1,400 workloads at most 0.9 an answer.
        most = 4 + len(simulation.answers)
        assert self._ever_preempted <= most, "a storm of preemptions"

    def note_residents(self) -> None:
        """Before a decision: who has blocks, in what rank, and whether protected."""
        there = (SequenceState.WAITING, SequenceState.RUNNING)
        self._residents.clear()
        self._highest_elsewhere = self._simulation.highest_noted
        for sequence in self._simulation.here:
            claim = sequence.claim
            assert claim is not None
            if sequence.state is SequenceState.SWAPPED:
                self._highest_elsewhere = max(self._highest_elsewhere, claim.priority)
            elif sequence.state in there and not sequence.ends_unread:
                protected = claim.num_preemptions >= self._max_preemptions
                rank = (-claim.priority, sequence.arrival)
                self._residents[sequence] = rank, protected

    def check_admission(self, entry: Entry) -> None:
        """Nobody overtakes one that has waited too long."""
        simulation = self._simulation
        now = simulation.now
        for other in simulation.queue.entries:
            if other is entry or other.rank(now) > entry.rank(now):
                continue
            overdue = now - other.arrived_s >= simulation.workload.max_passed_over_s
            assert not overdue, f"request {entry.arrival} overtook {other.arrival}, overdue"
        swapped = [s for s in simulation.here if s.state is SequenceState.SWAPPED]
        need = sum(
            blocks_for(s.num_computed, self._block_size)
            for s in swapped
            if s.claim is not None and s.claim.priority >= entry.newcomer.priority
        )
        if self._simulation.workload.mode is AdmissionMode.EXPECTED:
            left = simulation.pool.usage().available
            assert need <= left, "a newcomer has taken the room of those swapped out"

    def check_end(self) -> None:
        """Every answer has ended, and everything is back."""
        simulation = self._simulation
        for answer in simulation.answers:
            assert answer.outcome is not None, f"answer {answer.name} never ended"
            if answer.outcome is Outcome.FINISHED:
                assert len(answer.emitted) == answer.request.num_output_tokens, "a token is missing"
        assert simulation.now <= self._serial_s(), "slower than one after the other"
        assert not simulation.here, "the engine has forgotten a sequence"
        usage = simulation.pool.usage()
        assert (usage.held, usage.reserved) == (0, 0), f"blocks are left: {usage}"
        if simulation.host_pool is not None:
            assert simulation.host_pool.usage().held == 0, "host slots are left"
        assert len(simulation.ledger) == 0, "claims are left"
        simulation.pool.check_integrity()

    def _serial_s(self) -> float:
        """Until all would be done one after the other, each computed anew as often as it was
        preempted; nobody waits longer than this.
        """
        workload = self._simulation.workload
        total = 1.0 + max((event for event in self._simulation.times), default=0.0)
        for answer in self._simulation.answers:
            request = answer.request
            own = (request.num_output_tokens + 4) * workload.step_s
            own += request.max_rows * workload.prefill_s_per_token + 0.1
            own += 2 * blocks_for(request.max_rows, MIXED_TOKENS) * workload.step_s
            total += own * (1 + answer.num_preemptions)
        return total

    def _check_victims(self, victims: set[Sequence]) -> None:
        """The oldest never yields but to a higher priority; a protected one only as the last."""
        if not victims:
            return
        oldest = min(self._residents, key=lambda s: self._residents[s][0])
        for victim in victims:
            assert victim in self._residents, "a victim that had no blocks"
            rank, protected = self._residents[victim]
            for_higher = -rank[0] < self._highest_elsewhere and not protected
            assert victim is not oldest or for_higher, "the oldest had to yield"
            for other, (other_rank, other_protected) in self._residents.items():
                if other in victims or other is oldest or other is victim or other_protected:
                    continue
                assert not protected, "a protected one had to yield before others"
                assert other_rank < rank, "not the newest of the lowest priority had to yield"

    def _check_references(self) -> None:
        """Every held block is referred to by exactly those that there are."""
        simulation = self._simulation
        leases: dict[BlockLease, None] = dict.fromkeys(simulation.leaving)
        for answer in simulation.answers:
            if answer.lease is not None:
                leases[answer.lease] = None
        for sequence in simulation.here:
            if sequence.lease is not None:
                leases[sequence.lease] = None
        for flight in simulation.flights:
            leases.update(dict.fromkeys(flight.leases))
        right = Counter(simulation.fork_sources.values())
        for lease in leases:
            right.update(lease.blocks)
        for flight in simulation.flights:
            for blocks in flight.decision.free_after:
                right.update(blocks)
        assert simulation.pool.references() == dict(right), "held blocks are not those in use"

    def _check_rows(self) -> None:
        slots = 0
        for sequence in self._simulation.here:
            if sequence.state is SequenceState.SWAPPED:
                assert sequence.lease is not None
                assert not sequence.lease.blocks, "swapped out, and holds blocks"
                slots += blocks_for(sequence.num_computed, self._block_size)
            elif sequence.state is not SequenceState.DONE:
                assert sequence.lease is not None
                num_blocks = len(sequence.lease.blocks)
                assert sequence.num_computed <= num_blocks * self._block_size, "rows outgrow blocks"
                assert sequence.claim is not None
                num_rows = max(sequence.num_computed, sequence.claim.rows)
                assert num_blocks <= blocks_for(num_rows + 1, self._block_size), (
                    "holds a block that it does not need yet"
                )
        host_pool = self._simulation.host_pool
        held = host_pool.usage().held if host_pool is not None else 0
        assert held == slots, "host slots are not those in use"
