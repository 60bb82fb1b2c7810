"""DecodeWorkerSimulation: one decode worker in virtual time, with the production scheduler."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from legato.bench.simulation.answer import Answer, Outcome
from legato.bench.simulation.invariants import Invariants
from legato.bench.simulation.kv_model import KvModel
from legato.bench.simulation.queue import Entry, WaitingQueue
from legato.bench.simulation.report import Report
from legato.cluster.policies import BATCH_AGEING_S
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.priority import Priority
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionRule, NeverFitsError, Newcomer
from legato.worker.scheduling.output_lengths import OutputLengths
from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.bench.simulation.workload import Request, Workload
    from legato.worker.scheduling.claim import Claim
    from legato.worker.scheduling.decision import Decision
    from legato.worker.sequence import Sequence

# Until a returned answer is computed anew elsewhere and asks to be let in again.
_RETURN_DELAY_S = 0.05
# The queue is woken by every end; and now and then, since expectations change with every token.
_STEPS_BETWEEN_LOOKS = 4


@dataclass(frozen=True)
class _Flight:
    decision: Decision
    sampled: dict[Sequence, int]
    leases: list[BlockLease]


class DecodeWorkerSimulation:
    """Everything that the engine, the event loop, the router and the clients would do, one after
    the other, by a clock of its own. What the event loop does during a step happens between the
    decision and its copies, the worst moment there is.

    A run asserts what `Invariants` lists at every step, and every token: a token depends on each
    row of KV before it. Whatever is decided is logged; the log's SHA-256 names the run.
    """

    scheduler_class = CapacityScheduler
    ledger_class = CapacityLedger
    pool_class = BlockPool
    queue_class = WaitingQueue

    def __init__(self, workload: Workload, *, checks: bool = True) -> None:
        """Without `checks` only the tokens are compared: for figures over long traces."""
        self.workload = workload
        self.now = 0.0
        self.pool = self.pool_class(workload.num_blocks)
        self.host_pool = BlockPool(workload.num_slots) if workload.num_slots else None
        rule = AdmissionRule(workload.mode, workload.risk)
        lengths = OutputLengths(prior_tokens=workload.prior_tokens)
        self.ledger = self.ledger_class(self.pool, workload.block_size, rule, lengths)
        self.scheduler = self.scheduler_class(
            self.pool,
            self.ledger,
            workload.max_batch_size,
            self.host_pool,
            mixes_prompts=workload.mixes_prompts,
        )
        self.queue = self.queue_class(workload.max_passed_over_s)
        self.kv = KvModel(workload.num_blocks, workload.num_slots, workload.block_size)
        self.here: dict[Sequence, Answer] = {}  # what the engine knows
        self.flights: list[_Flight] = []
        self.fork_sources: dict[Sequence, int] = {}  # blocks whose copy is not decided yet
        self.leaving: dict[BlockLease, Claim] = {}  # the engine has yet to be told
        self.highest_noted = Priority.BATCH  # who waits, as far as the engine has been told
        self.answers: list[Answer] = []
        self.times: list[float] = []  # at which clients do something
        self.report = Report()
        self._commands: list[Callable[[], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = count()
        self._hash = hashlib.sha256()
        self._invariants = Invariants(self) if checks else None

    def run(self) -> Report:
        """Until every answer has its outcome and every block is back."""
        for request in self.workload.requests:
            for wait_s in (0.0, request.cancel_s, request.deadline_s):
                self.times.append(request.arrival_s + (wait_s or 0.0))
            self._at(request.arrival_s, partial(self._arrive, request))
        while True:
            self._do_events(self.now)
            self._apply_commands()
            if self._invariants is not None:
                self._invariants.note_residents()
            decision = self.scheduler.schedule(self.now)
            if self._invariants is not None and decision is not None:
                self._invariants.check_decision(decision)
            if decision is None and not self.flights:
                if self._commands:
                    continue
                if not self._events:
                    break
                self.now = max(self.now, self._events[0][0])
                continue
            if decision is not None:
                for sequence in self.here:
                    self.fork_sources.pop(sequence, None)
                self._log_decision(decision)
                self.report.note_step(
                    self.pool.usage(), decision, self.scheduler, self.workload.step_s
                )
            self._do_events(self.now + self.workload.step_s)
            if decision is not None:
                self.flights.append(self._launch(decision))
            self.now += self.workload.step_s
            if len(self.flights) > (1 if self.workload.overlap and decision is not None else 0):
                self._finish(self.flights.pop(0))
            if self._invariants is not None:
                self._invariants.check()
        if self._invariants is not None:
            self._invariants.check_end()
        self.report.finish(self.answers, self.scheduler.num_preemptions, self._hash.hexdigest())
        return self.report

    # The router and the clients.

    def _arrive(self, request: Request) -> None:
        answers = [
            Answer(request, index, self.workload.block_size) for index in range(request.num_answers)
        ]
        self.answers.extend(answers)
        self._log("arrive", request.number)
        if request.cancel_s is not None:
            self._at(self.now + request.cancel_s, partial(self._cancel, answers))
        if request.deadline_s is not None:
            self._at(self.now + request.deadline_s, partial(self._cancel, answers))
        self._wait(answers, request.num_prompt_tokens)

    def _wait(self, answers: list[Answer], rows: int) -> None:
        request = answers[0].request
        newcomer = Newcomer(
            rows=rows,
            max_rows=request.max_rows,
            max_tokens=request.max_tokens,
            priority=request.priority,
            num_preemptions=answers[0].num_preemptions,
            num_answers=len(answers),
        )
        try:
            self.ledger.check_can_fit(newcomer)
        except NeverFitsError:
            for answer in answers:
                self._end(answer, Outcome.REFUSED)
            return
        entry = Entry(
            newcomer,
            arrival=request.number * 16 + answers[0].index,
            arrived_s=request.arrival_s,
            start=lambda: self._start(entry, answers),
        )
        self.queue.entries.append(entry)
        self._dispatch()

    def _start(self, entry: Entry, answers: list[Answer]) -> None:
        """Asks the worker for room, and sends the prompt to prefill."""
        if answers[0].outcome is not None:  # one call: all are cancelled together
            return  # cancelled in the queue: nothing was spent on it
        newcomer = entry.newcomer
        ahead: list[Newcomer] = []
        if newcomer.priority is Priority.BATCH and self.now - entry.arrived_s < BATCH_AGEING_S:
            ahead = self.queue.interactive(self.now)
        claims = self.ledger.admit(newcomer, ahead)
        if self._invariants is not None:
            self._invariants.check_admission(entry)
        self._log("admit", *(a.name for a in answers))
        for answer, claim in zip(answers, claims, strict=True):
            answer.claim = claim
            answer.admitted_s = self.now if answer.admitted_s is None else answer.admitted_s
        if answers[0].request.local and len(answers) == 1:
            self._begin_here(answers[0])
            return
        took_s = newcomer.rows * self.workload.prefill_s_per_token
        self._at(self.now + took_s / 2, partial(self._begin_landing, answers))
        self._at(self.now + took_s, partial(self._land, answers))

    def _begin_here(self, answer: Answer) -> None:
        """The worker computes what it does not find."""
        assert answer.claim is not None
        size = self.workload.block_size
        hashes = self._block_hashes(answer)[: (answer.claim.rows - 1) // size]
        blocks, answer.num_found_blocks = self.ledger.bind(answer.claim, hashes)
        answer.lease = BlockLease(self.pool, blocks)
        self._log("bind", answer.name, *blocks)
        sequence = answer.sequence = answer.new_sequence(
            named=self.workload.prefix_cache, num_computed=answer.num_found_blocks * size
        )
        self._commands.append(partial(self._submit, answer, sequence, None))

    def _begin_landing(self, answers: list[Answer]) -> None:
        first = answers[0]
        if first.claim is not None:
            hashes = self._block_hashes(first)
            blocks, first.num_found_blocks = self.ledger.bind(first.claim, hashes)
            first.lease = BlockLease(self.pool, blocks)
            self._log("bind", first.name, *blocks)

    def _land(self, answers: list[Answer]) -> None:
        """The rows are there; of several answers, the others go on from the first one's rows."""
        first = answers[0]
        if first.claim is None or first.lease is None:
            for answer in answers[1:]:  # the first was cancelled, so all were
                assert answer.claim is None
            return
        num_rows = first.claim.rows
        size = self.workload.block_size
        for position in range(first.num_found_blocks * size, num_rows):
            row = first.row(position, first.token(position))
            self.kv.write(first.lease.blocks, position, row)
        for block, name in zip(first.lease.blocks, self._block_hashes(first), strict=False):
            self.pool.register(block, name)
        num_full, rest = divmod(num_rows, size)
        for answer in answers:
            answer.emit(answer.prefill())
            source = None
            if answer is not first:
                assert answer.claim is not None
                own = self.ledger.bind_fork(answer.claim)
                self.pool.share(first.lease.blocks[: num_full + bool(rest)])
                answer.lease = BlockLease(self.pool, first.lease.blocks[:num_full] + own)
                source = first.lease.blocks[num_full] if rest else None
                self._log("fork", answer.name, *own)
            sequence = answer.sequence = answer.new_sequence(named=self.workload.prefix_cache)
            if source is not None:
                self.fork_sources[sequence] = source
            self._commands.append(partial(self._submit, answer, sequence, source))
        for answer in answers:
            if len(answer.emitted) == answer.request.num_output_tokens:
                self._end(answer, Outcome.FINISHED)  # prefill gave the last token

    def _block_hashes(self, answer: Answer) -> list[bytes]:
        """Of all rows that the hand-off brings."""
        return answer.hasher().block_hashes(answer.tokens()) if self.workload.prefix_cache else []

    def _cancel(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.outcome is None:
                self._log("cancel", answer.name)
                self._end(answer, Outcome.CANCELLED)

    def _end(self, answer: Answer, outcome: Outcome) -> None:
        """Frees whatever the answer holds where it stands now."""
        answer.outcome = outcome
        answer.ended_s = self.now
        self._leave(answer)
        self._dispatch()

    def _leave(self, answer: Answer) -> None:
        claim, lease, sequence = answer.claim, answer.lease, answer.sequence
        if claim is not None:
            answer.num_preemptions = claim.num_preemptions
        answer.claim = answer.lease = answer.sequence = None
        if sequence is not None and lease is not None:
            assert claim is not None
            self.leaving[lease] = claim
            self._commands.append(partial(self._release, sequence, lease))
        elif claim is not None:
            self.ledger.withdraw(claim)
            if lease is not None:
                lease.release()

    def _dispatch(self) -> None:
        self.queue.dispatch(self.now)
        first = self.queue.first_interactive(self.now)
        self._commands.append(partial(self._note_waiting, [first] if first else []))

    # The engine.

    def _note_waiting(self, waiting: list[Newcomer]) -> None:
        self.scheduler.note_waiting(waiting)
        self.highest_noted = max((n.priority for n in waiting), default=Priority.BATCH)

    def _apply_commands(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _submit(self, answer: Answer, sequence: Sequence, source: int | None) -> None:
        self.here[sequence] = answer
        if answer.index == 0 or source is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.fork(sequence, source)

    def _release(self, sequence: Sequence, lease: BlockLease) -> None:
        del self.here[sequence]
        self.fork_sources.pop(sequence, None)
        self.scheduler.remove(sequence)
        lease.release()
        del self.leaving[lease]
        self._dispatch()

    def _launch(self, decision: Decision) -> _Flight:
        self.kv.move(decision)
        leases = []
        sampled: dict[Sequence, int] = {}
        unread = self.flights[-1].sampled if self.flights else {}
        for part in decision.parts:
            sequence = part.sequence
            assert sequence.lease is not None, "scheduled without blocks"
            sequence.lease.acquire_again()
            leases.append(sequence.lease)
            answer = self.here[sequence]
            end = sequence.num_computed + part.num_tokens
            for position in range(sequence.num_computed, end):
                known = position < len(sequence.token_ids)
                token = sequence.token_ids[position] if known else unread[sequence]
                self.kv.write(sequence.lease.blocks, position, answer.row(position, token))
            if part.samples:
                sampled[sequence] = answer.sample(end, self.kv.digests(sequence.lease.blocks, end))
        self.scheduler.commit(decision)
        for sequence in sampled:
            sequence.num_unread += 1
        return _Flight(decision, sampled, leases)

    def _finish(self, flight: _Flight) -> None:
        self.scheduler.settle(flight.decision)
        for lease in flight.leases:
            lease.drop()
        for sequence, token in flight.sampled.items():
            sequence.num_unread -= 1
            answer = self.here.get(sequence)
            if answer is None or sequence.finish_reason is not None:
                continue
            self._log("token", answer.name, token)
            self._emit(answer, sequence, token)
        for sequence in flight.decision.returned:
            answer = self.here.get(sequence)
            if answer is not None and answer.outcome is None:
                self._return(answer, sequence)
        freed = flight.decision.free_after or any(lease.released for lease in flight.leases)
        if freed or self.report.steps % _STEPS_BETWEEN_LOOKS == 0:
            self._dispatch()

    def _emit(self, answer: Answer, sequence: Sequence, token: int) -> None:
        reason = sequence.append(token)
        if answer.outcome is not None:
            return  # cancelled: nobody listens
        answer.emit(token)
        assert len(answer.emitted) == sequence.num_output_tokens, "an index is skipped or doubled"
        if reason is not None:
            self.scheduler.remove(sequence)
            self._end(answer, Outcome.FINISHED)

    def _return(self, answer: Answer, sequence: Sequence) -> None:
        """The answer goes on from its tokens: it waits for room as it did at first."""
        self._log("returned", answer.name)
        self._leave(answer)
        rows = answer.request.num_prompt_tokens + len(answer.emitted)

        def wait_again() -> None:
            if answer.outcome is None:
                self._wait([answer], rows)

        self._at(self.now + _RETURN_DELAY_S, wait_again)

    # Time and log.

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._event_numbers), action))

    def _do_events(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            _, _, action = heapq.heappop(self._events)
            action()

    def _log_decision(self, decision: Decision) -> None:
        names = self.here
        self._log("step", *(names[p.sequence].name for p in decision.parts))
        for out in decision.swap_outs:
            self._log("out", names[out.sequence].name, *out.blocks, "to", *out.slots)
        for back in decision.swap_ins:
            self._log("in", names[back.sequence].name, *back.slots, "to", *back.blocks)
        for sequence in decision.returned:
            self._log("return", names[sequence].name)

    def _log(self, *words: object) -> None:
        self._hash.update(f"{self.now:.6f} {' '.join(map(str, words))}\n".encode())


def residents(simulation: DecodeWorkerSimulation) -> list[Sequence]:
    """Sequences that the engine knows and that have blocks."""
    there = (SequenceState.WAITING, SequenceState.RUNNING)
    return [s for s in simulation.here if s.state in there]
