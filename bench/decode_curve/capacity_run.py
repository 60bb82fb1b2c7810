"""CapacityRun: one trace through queue, ledger, scheduler, model and sampler, and its record."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.simulation.queue import Entry, WaitingQueue
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.sampler import SamplingRow, sample
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import NeverFitsError, Newcomer
from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.bench.decode_curve.capacity_engine import CapacityEngine
    from legato.bench.decode_curve.trace import Request
    from legato.worker.scheduling.claim import AdmissionRule
    from legato.worker.scheduling.decision import Decision

# Queue and scheduler go by a clock of their own, so that what they decide, and with it occupancy
# and preemptions, is the same on every machine: only the seconds are measured.
_STEP_S = 0.02
_STEPS_BETWEEN_LOOKS = 4  # the queue is woken by every end; expectations change with every token
_MAX_PASSED_OVER_S = 2.0


@dataclass(frozen=True)
class StepRecord:
    """One decode step, measured from its decision to its sampled tokens, swaps included."""

    seconds: float
    num_sequences: int  # that got a token
    decode_bytes: int  # that the step cannot do without reading
    held_blocks: int  # of the pool, from the decision on
    rows_in_use: int  # of KV in the pool, once the step has written its own
    num_waiting: int  # requests that wait to be admitted
    num_ended: int  # answers that had ended before it


@dataclass(frozen=True)
class RunRecord:
    """What became of a trace."""

    answers: dict[int, list[int]]  # by the request's number; without those that were cancelled
    steps: list[StepRecord]
    total_blocks: int
    total_rows: int
    num_preemptions: int  # swapped out or returned
    num_returns: int  # of these, computed anew from prompt and tokens
    blocks_moved: int  # to the host's memory and back


@dataclass(frozen=True)
class Progress:
    """Of a run under way."""

    num_steps: int
    num_ended: int
    num_requests: int


class CapacityRun:
    """A run, once. Prefill writes straight to the decode pool's blocks, and is not measured."""

    def __init__(
        self,
        engine: CapacityEngine,
        requests: SequenceOf[Request],
        rule: AdmissionRule,
        num_at_once: int | None,
        num_steps: int | None,
        on_step: Callable[[Progress], None] | None,
    ) -> None:
        self._engine = engine
        self._requests = {request.number: request for request in requests}
        self._unsent = deque(requests)
        self._num_at_once = num_at_once or len(requests)
        self._max_steps = num_steps
        self._on_step = on_step
        self._block_size = engine.cache.shape.block_size
        self._pool = BlockPool(engine.cache.num_blocks)
        self._host_pool = BlockPool(engine.num_slots) if engine.num_slots else None
        self._ledger = CapacityLedger(self._pool, self._block_size, rule)
        self._scheduler = CapacityScheduler(
            self._pool, self._ledger, engine.max_batch_size, self._host_pool
        )
        self._queue = WaitingQueue(_MAX_PASSED_OVER_S)
        self._here: dict[Sequence, None] = {}  # admitted; by arrival, whatever the hashes
        self._admitted: list[Sequence] = []  # to be prefilled
        self._answers: dict[int, list[int]] = {}
        self._steps: list[StepRecord] = []
        self._num_returns = self._blocks_moved = 0
        self._looks = True  # blocks have become free

    @property
    def _now(self) -> float:
        return len(self._steps) * _STEP_S

    def run(self) -> RunRecord:
        """See `CapacityEngine.run`."""
        for request in self._requests.values():
            self._check(request)
        while self._unsent or self._queue.entries or self._here:
            if self._max_steps is not None and len(self._steps) >= self._max_steps:
                self._cancel_all()
                break
            self._send()
            if self._looks or len(self._steps) % _STEPS_BETWEEN_LOOKS == 0:
                self._looks = False
                self._queue.dispatch(self._now)
            while self._admitted:
                self._prefill()
            if self._here:
                self._decode()
            else:
                assert self._looks, "requests wait, and nothing can run"
        self._pool.check_integrity()
        assert self._pool.usage().available == self._pool.total, "blocks are left over"
        assert self._host_pool is None or self._host_pool.usage().held == 0, "slots are left over"
        return RunRecord(
            answers=self._answers,
            steps=self._steps,
            total_blocks=self._pool.total,
            total_rows=self._pool.total * self._block_size,
            num_preemptions=self._scheduler.num_preemptions,
            num_returns=self._num_returns,
            blocks_moved=self._blocks_moved,
        )

    # Into the pool.

    def _check(self, request: Request) -> None:
        limit = self._engine.model.config.context_length
        if request.max_rows + 1 > limit:
            raise ValueError(
                f"a request needs a context of {request.max_rows + 1} tokens, "
                f"limit {limit}: the model's context_length"
            )
        try:
            self._ledger.check_can_fit(_newcomer(request, len(request.prompt), 0))
        except NeverFitsError as error:
            raise ValueError(f"kv_memory_bytes is too small: {error}") from error

    def _send(self) -> None:
        while self._unsent and len(self._queue.entries) + len(self._here) < self._num_at_once:
            request = self._unsent.popleft()
            self._wait(request, list(request.prompt), 0)
            self._looks = True

    def _wait(self, request: Request, token_ids: list[int], num_preemptions: int) -> None:
        newcomer = _newcomer(request, len(token_ids), num_preemptions)
        self._queue.entries.append(
            Entry(
                newcomer,
                arrival=request.number,
                arrived_s=self._now,
                start=lambda: self._start(request, token_ids, newcomer),
            )
        )

    def _start(self, request: Request, token_ids: list[int], newcomer: Newcomer) -> None:
        """Raises NoRoomNowError where the ledger says so."""
        [claim] = self._ledger.admit(newcomer)
        blocks, _ = self._ledger.bind(claim)
        sequence = Sequence(
            token_ids,
            len(request.prompt),
            request.params,
            request.eos_token_ids,
            lease=BlockLease(self._pool, blocks),
            arrival=request.number,
            claim=claim,
        )
        self._here[sequence] = None
        self._admitted.append(sequence)

    def _prefill(self) -> None:
        """One forward of those that were admitted, as far as they go into a chunk."""
        room = self._engine.chunk_tokens
        parts: list[StepPart] = []
        for sequence in self._admitted:
            count = min(room, len(sequence.token_ids) - sequence.num_computed)
            if count == 0:
                break
            parts.append(StepPart(sequence, count))
            room -= count
        sampling = [part.sequence for part in parts if part.samples]
        tokens = self._forward(Step(parts), sampling)
        for part in parts:
            part.sequence.num_computed += part.num_tokens
        for sequence, token_id in zip(sampling, tokens, strict=True):
            self._admitted.remove(sequence)
            if sequence.append(token_id) is None:
                self._scheduler.add(sequence)
            else:  # as in service: decode never hears of it
                self._answers[sequence.arrival] = sequence.output_token_ids
                self._free(sequence)

    # Decode.

    def _decode(self) -> None:
        started_s = time.perf_counter()
        decision = self._scheduler.schedule(self._now)
        assert decision is not None, "sequences are here, and nothing can run"
        held_blocks = self._pool.usage().held
        sequences = [part.sequence for part in decision.parts]
        self._engine.mover.run(decision)
        tokens = self._forward(decision, sequences) if sequences else []
        self._scheduler.commit(decision)
        self._scheduler.settle(decision)
        seconds = time.perf_counter() - started_s
        self._note(decision, sequences, seconds, held_blocks)
        for sequence, token_id in zip(sequences, tokens, strict=True):
            if sequence.append(token_id) is not None:
                self._answers[sequence.arrival] = sequence.output_token_ids
                self._leave(sequence)
        for sequence in decision.returned:
            self._return(sequence)
        self._looks = self._looks or bool(decision.free_after)
        if self._on_step is not None:
            self._on_step(Progress(len(self._steps), len(self._answers), len(self._requests)))

    def _forward(self, step: Step, sampling: list[Sequence]) -> list[int]:
        """The tokens of those that sample."""
        logits = self._engine.runner.forward(step)
        sampled = sample(logits, [SamplingRow.of(s) for s in sampling]) if sampling else []
        tokens = [token.token_id for token in sampled if token is not None]
        if len(tokens) < len(sampling):
            raise ValueError("the model gave no usable logits: NaN or infinite values")
        return tokens

    def _note(
        self,
        decision: Decision,
        sequences: list[Sequence],
        seconds: float,
        held_blocks: int,
    ) -> None:
        outs = sum(len(out.blocks) for out in decision.swap_outs)
        self._blocks_moved += outs + sum(len(back.blocks) for back in decision.swap_ins)
        # What was swapped out or returned has no rows in the pool.
        there = (SequenceState.WAITING, SequenceState.RUNNING)
        self._steps.append(
            StepRecord(
                seconds=seconds,
                num_sequences=len(sequences),
                decode_bytes=self._engine.cost.decode_bytes([s.num_computed for s in sequences]),
                held_blocks=held_blocks,
                rows_in_use=sum(s.num_computed for s in self._here if s.state in there),
                num_waiting=len(self._unsent) + len(self._queue.entries),
                num_ended=len(self._answers),
            )
        )

    # Out of the pool.

    def _return(self, sequence: Sequence) -> None:
        """It goes on from its tokens: it waits for room as it did at first, at its old place."""
        assert sequence.claim is not None, "it was admitted"
        self._num_returns += 1
        self._leave(sequence)
        request = self._requests[sequence.arrival]
        self._wait(request, list(sequence.token_ids), sequence.claim.num_preemptions)

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.lease is not None, "it was admitted"
        assert sequence.claim is not None, "it was admitted"
        self._ledger.withdraw(sequence.claim)
        sequence.lease.release()
        del self._here[sequence]
        self._looks = True

    def _cancel_all(self) -> None:
        self._unsent.clear()
        self._queue.entries.clear()
        for sequence in list(self._here):
            self._leave(sequence)


def _newcomer(request: Request, rows: int, num_preemptions: int) -> Newcomer:
    return Newcomer(
        rows=rows,
        max_rows=request.max_rows,
        max_tokens=request.params.max_tokens,
        num_preemptions=num_preemptions,
    )
