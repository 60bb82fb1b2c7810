"""Engine: one thread that repeats schedule → run → commit for one scheduler."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from legato.text.guide_matcher import GuideError
from legato.worker.broken_steps import BrokenSteps
from legato.worker.commands import (
    CommandQueue,
    Fork,
    NoteWaiting,
    Park,
    Release,
    Resume,
    Submit,
)
from legato.worker.engine_stats import EngineStats
from legato.worker.flight import Flight
from legato.worker.guide_masks import GuideMasks
from legato.worker.layer_signal import LayerSignal
from legato.worker.local_prefill import LocalPrefill
from legato.worker.mailbox import (
    BrokenEvent,
    EngineDiedError,
    JoinedEvent,
    Mailbox,
    ParkedEvent,
    PreemptedEvent,
    TokenEvent,
)
from legato.worker.model_runner import ModelRunner
from legato.worker.outbox import Outbox
from legato.worker.sampler import SamplingRow
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.decision import Decision
from legato.worker.scheduling.live import claim_of, lease_of
from legato.worker.sequence import FinishReason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    import numpy as np
    from numpy.typing import NDArray

    from legato.worker.commands import Command
    from legato.worker.forward import Model
    from legato.worker.guide_masks import PendingMasks
    from legato.worker.kv.cache import KvCache
    from legato.worker.kv.mover import KvMover
    from legato.worker.logits import Logits
    from legato.worker.mailbox import EngineEvent
    from legato.worker.sampler import PendingTokens, Sampled
    from legato.worker.scheduling.claim import Newcomer
    from legato.worker.scheduling.step import Scheduler, Step
    from legato.worker.sequence import Sequence

    SampleFunction = Callable[[Logits, SequenceOf[SamplingRow]], PendingTokens]

_log = logging.getLogger(__name__)
# The engine is woken by every command; this only bounds the wait.
_IDLE_WAIT_S = 1.0


@dataclass(frozen=True)
class _StepNow:
    started_at_s: float
    num_tokens: int


class Engine:
    """Runs the model. Commands come in through a queue that the thread empties between two steps;
    events go out to the event loop's mailboxes, in one call per step.

    Whatever goes wrong in a step is the engine's own fault, since requests are validated before
    they come here: it is fatal, every mailbox fails and `on_failure` is called on the loop. A
    sequence whose logits are NaN or infinite (an fp16 model may overflow on one prompt) ends alone,
    unless `BrokenSteps` says that there are too many.
    """

    def __init__(
        self,
        *,
        model: Model,
        cache: KvCache,
        scheduler: Scheduler,
        sample: SampleFunction,
        device: torch.device,
        max_batch_size: int,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
        counts_prompt_tokens: bool,
        overlap: bool | None = None,
        mover: KvMover | None = None,
    ) -> None:
        """`overlap`: start a step before the tokens of the last are read; None: on CUDA. `mover`:
        of a decode worker. Raises OSError where a prefill worker can open no more files.
        """
        self._runner = ModelRunner(model, cache, device, max_batch_size)
        self._scheduler = scheduler
        self._mover = mover
        self._sample = sample
        self._overlaps = device.type == "cuda" if overlap is None else overlap
        self._on_failure = on_failure
        self._counts_prompts = counts_prompt_tokens
        self._commands = CommandQueue()
        self._stats = EngineStats()  # guarded by the queue's condition
        self._layers = LayerSignal(cache.shape, device, loop)
        if counts_prompt_tokens:  # in prefill, whose rows are waited for
            self._layers.open()
        # Of the engine thread:
        self._outbox = Outbox(loop)
        self._steps = 0
        self._tokens = 0
        self._model_s = 0.0
        self._num_returned = 0
        self._local_prefill = LocalPrefill()
        self._broken_steps = BrokenSteps()
        self._guide_masks = GuideMasks()
        self._finished_at_s = 0.0
        self._step_now: _StepNow | None = None  # replaced as a whole: a reader sees one step
        # Of the event loop:
        self._open: set[Mailbox] = set()
        self._failure: EngineDiedError | None = None
        self._thread = threading.Thread(target=self._main, name="legato-engine", daemon=True)

    # Called on the event loop.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end after its step; True when it has. Blocks: call it off the loop."""
        self._commands.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, sequence: Sequence) -> Mailbox:
        """Queues a sequence. Every submitted one must be released, once, by its caller."""
        return self._submit(Submit(sequence, Mailbox()))

    def fork(self, sequence: Sequence, source: int | None) -> Mailbox:
        """Queues a further answer in decode, as `submit`. See `CapacityScheduler.fork`."""
        return self._submit(Fork(sequence, Mailbox(), source))

    def release(self, sequence: Sequence, mailbox: Mailbox, *, stopped: bool = False) -> None:
        """Takes the sequence out before the next step and ends its hold on its blocks.

        `stopped`: its answer has ended, with a stop string, and was not cancelled.
        """
        self._open.discard(mailbox)
        if sequence.progress is not None:
            self._layers.discard(sequence.progress)
        self._commands.put(Release(sequence, stopped))

    def park(self, sequence: Sequence, number: int) -> None:
        """Takes the sequence out of the batch after the step under way; a ParkedEvent of that
        number follows, unless it ends before, or is to resume.
        """
        self._commands.put(Park(sequence, number))

    def resume(self, sequence: Sequence) -> None:
        """The sequence goes on, parked or not."""
        self._commands.put(Resume(sequence))

    def note_waiting(self, wanted: list[Newcomer]) -> None:
        """Who waits to be admitted to decode, the first first. See `CapacityScheduler`."""
        self._commands.put(NoteWaiting(wanted))

    def wake(self) -> None:
        """Lets it schedule again: blocks became free by another's hand."""
        self._commands.wake()

    def stats(self) -> EngineStats:
        """As of the last step, plus the sequences that came in since."""
        with self._commands.changed:
            stats, new = self._stats, self._commands.submitted()
        new_tokens = sum(len(s.token_ids) for s in new) if self._counts_prompts else 0
        return replace(
            stats,
            waiting=stats.waiting + len(new),
            waiting_tokens=stats.waiting_tokens + new_tokens,
        )

    def busy(self) -> tuple[float, int]:
        """Seconds that the step under way has taken, and its tokens; (0, 0) between steps."""
        step = self._step_now
        return (time.perf_counter() - step.started_at_s, step.num_tokens) if step else (0.0, 0)

    def fail(self, cause: BaseException) -> None:
        """Ends every call with EngineDiedError and reports the failure, once."""
        if self._failure is not None:
            return
        self._failure = EngineDiedError(f"the engine failed: {type(cause).__name__}: {cause}")
        for mailbox in self._open:
            mailbox.fail(self._failure)
        self._open.clear()
        self._on_failure(cause)

    def _submit(self, command: Submit) -> Mailbox:
        mailbox = command.mailbox
        if self._failure is not None:
            mailbox.fail(self._failure)
            return mailbox
        command.sequence.submitted_at_s = time.perf_counter()
        self._open.add(mailbox)
        if command.sequence.progress is not None:
            self._layers.add(command.sequence.progress)
        self._commands.put(command)
        return mailbox

    # Called on the engine thread.

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._loop_over_steps()
        except BaseException as error:  # reported below: nothing is swallowed
            _log.critical("the engine failed", exc_info=error)
            self._outbox.call(self.fail, error)
        finally:
            self._guide_masks.close()
            self._outbox.call(LayerSignal.close, self._layers)

    def _loop_over_steps(self) -> None:
        """Where steps overlap, the next one is scheduled and started before the tokens of the one
        under way are read; a sequence that turns out to have ended wastes its row of one step.
        """
        flight: Flight | None = None
        while True:
            if flight is not None and flight.reads_output:
                self._finish(flight)
                flight = None
            step = self._next_step(wait=flight is None)
            if step is None and flight is None:
                return
            launched = None if step is None else self._launch(step, flight)
            if flight is not None:
                self._finish(flight)
            if launched is not None and not self._overlaps:
                self._finish(launched)
                launched = None
            if launched is None:
                self._step_now = None
            flight = launched

    def _next_step(self, *, wait: bool) -> Step | None:
        """Applies commands and schedules. None: nothing can run, or with `wait`: time to end."""
        with self._commands.changed:
            while not self._commands.stopping:
                for command in self._commands.take():
                    self._apply(command)
                step = self._scheduler.schedule(time.monotonic())
                self._tell_parked()
                self._note_stats()
                if step is not None or not wait:
                    return step
                self._commands.wait(_IDLE_WAIT_S)
            return None

    def _apply(self, command: Command) -> None:
        if isinstance(command, NoteWaiting):
            self._capacity_scheduler().note_waiting(command.wanted)
            return
        sequence = command.sequence
        if isinstance(command, Park):
            self._capacity_scheduler().park(sequence, command.number)
            return
        if isinstance(command, Resume):
            self._capacity_scheduler().resume(sequence)
            return
        if isinstance(command, Release):
            self._outbox.close(sequence)
            if command.stopped and sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.STOP
            self._scheduler.remove(sequence)
            if sequence.lease is not None:
                sequence.lease.release()
            return
        self._outbox.open(sequence, command.mailbox)
        if isinstance(command, Fork):
            self._capacity_scheduler().fork(sequence, command.source)
        else:
            self._scheduler.add(sequence)

    def _capacity_scheduler(self) -> CapacityScheduler:
        assert isinstance(self._scheduler, CapacityScheduler), "a prefill engine has no capacity"
        return self._scheduler

    def _launch(self, step: Step, before: Flight | None) -> Flight:
        """Starts a step. On a device this returns while the device computes."""
        started_at_s = time.perf_counter()
        self._step_now = _StepNow(started_at_s, step.num_tokens)
        self._note_joined([part.sequence for part in step.parts], started_at_s)
        leases = [lease_of(part.sequence) for part in step.parts]
        for lease in leases:
            lease.acquire_again()  # the device writes there, whatever becomes of the sequence
        if isinstance(step, Decision):
            assert self._mover is not None, "a decode engine needs a mover"
            self._mover.run(step)
            started_at_s = time.perf_counter()

        sequences = [part.sequence for part in step.parts if part.samples]
        reads_before = any(s.guide is not None and s.num_unread for s in sequences)
        # While the model runs, where what was emitted is known.
        masks = None if reads_before else self._guide_masks.begin(sequences)
        reports, watched = self._layers.begin(step, before)
        sampled, scores, model_s = None, None, 0.0
        if step.parts:
            unread = before.unread() if before is not None else None
            logits = self._runner.forward(step, unread, reports)
            model_s = time.perf_counter() - started_at_s
            scores = logits.scores
            if scores is not None:
                scores.fetch()
        self._scheduler.commit(step)
        if sequences:
            if reads_before:
                # The device has work; only what it is to choose from waits for the last tokens.
                assert before is not None, "an unread token is of a step under way"
                self._finish(before)
                masks = self._guide_masks.begin([s for s in sequences if self._is_wanted(s)])
            sampled = self._sample_rows(logits, sequences, masks)
        for sequence in sequences:
            sequence.num_unread += 1
        return Flight(
            step, sequences, sampled, leases, started_at_s, model_s, reports, watched, scores
        )

    def _note_joined(self, sequences: list[Sequence], now_s: float) -> None:
        joined = [s for s in sequences if s.first_step_at_s is None]
        for sequence in joined:
            sequence.first_step_at_s = now_s
        self._outbox.publish([(s, JoinedEvent()) for s in joined])

    def _sample_rows(
        self, logits: Logits, sequences: list[Sequence], masks: PendingMasks | None
    ) -> PendingTokens:
        """For each sequence a row for each of its answers, of the same logits."""
        counts = [sequence.num_answers for sequence in sequences]
        if max(counts) > 1:
            logits = logits.take([row for row, n in enumerate(counts) for _ in range(n)])
        allowed: dict[Sequence, NDArray[np.int32]] = {}
        for sequence, mask in (masks.collect() if masks is not None else {}).items():
            if isinstance(mask, GuideError):
                sequence.guide_failure = str(mask)  # its row is of no use
            else:
                allowed[sequence] = mask
        rows = [
            SamplingRow.of(sequence, answer, allowed.get(sequence))
            for sequence in sequences
            for answer in range(sequence.num_answers)
        ]
        return self._sample(logits, rows)

    def _finish(self, flight: Flight) -> None:
        """Waits for a step's tokens and hands them out, once."""
        if flight.finished:
            return
        flight.finished = True
        collected = flight.collect()
        if flight.sampled is None:  # nothing was read, so nothing was waited for
            self._runner.wait()
        model_s = flight.model_s
        if self._overlaps:
            # Steps follow each other without a gap: this one had the device since the last.
            now_s = time.perf_counter()
            model_s = now_s - max(flight.started_at_s, self._finished_at_s)
            self._finished_at_s = now_s
        self._layers.end(flight)
        self._scheduler.settle(flight.step)
        flight.unpin()
        for part in flight.step.parts:
            part.sequence.num_forwards += 1
            part.sequence.model_s += model_s
        wanted = []
        for sequence, tokens in collected:
            sequence.num_unread -= 1
            if self._is_wanted(sequence):
                wanted.append((sequence, tokens))
        self._broken_steps.note([tokens[0] for _, tokens in wanted])
        events = [(s, event) for s, tokens in wanted for event in self._append(s, tokens)]
        # What the step before sampled for these has been told, and may have been their end.
        events += [
            (s, PreemptedEvent(claim_of(s).num_preemptions))
            for s in flight.returned
            if self._is_wanted(s)
        ]
        self._num_returned += len(flight.returned)
        if flight.num_prompt_tokens:
            self._local_prefill = self._local_prefill.after(
                flight.num_prompt_tokens, model_s, time.monotonic()
            )
        self._steps += 1 if flight.step.parts else 0
        self._tokens += flight.step.num_tokens
        self._model_s += model_s
        with self._commands.changed:
            self._note_stats()
        self._outbox.publish(events)
        self._tell_parked()

    def _tell_parked(self) -> None:
        if isinstance(self._scheduler, CapacityScheduler):
            events: list[tuple[Sequence, EngineEvent]] = []
            for sequence, number in self._scheduler.take_parked():
                rows = sequence.num_computed
                assert rows == len(sequence.token_ids) - 1, "a token or a row is missing"
                events.append((sequence, ParkedEvent(number, rows)))
            self._outbox.publish(events)

    def _is_wanted(self, sequence: Sequence) -> bool:
        """False of one that ended, or was released, while a step was under way."""
        return sequence in self._outbox and sequence.finish_reason is None

    def _append(
        self, sequence: Sequence, sampled: SequenceOf[Sampled | None]
    ) -> SequenceOf[EngineEvent]:
        """`sampled`: one for each of the sequence's answers."""
        index = sequence.num_output_tokens
        if sequence.guide_failure is not None:
            sequence.finish_reason = FinishReason.BROKEN
            self._scheduler.remove(sequence)
            return [BrokenEvent(index, sequence.guide_failure)]
        tokens = [token for token in sampled if token is not None]
        scores = sequence.prompt_scores
        if len(tokens) < len(sampled) or (scores is not None and scores.broken):
            _log.warning("a request ends: no usable logits at output position %d", index)
            sequence.finish_reason = FinishReason.BROKEN
            self._scheduler.remove(sequence)
            return [BrokenEvent(index)]
        assert sequence.first_step_at_s is not None
        events = [
            TokenEvent(
                sampled=token,
                index=index,
                finish_reason=sequence.end_with(token.token_id),
                num_forwards=sequence.num_forwards,
                model_s=sequence.model_s,
                wait_s=sequence.first_step_at_s - sequence.submitted_at_s,
                answer=answer,
                num_swaps=sequence.num_swaps,
            )
            for answer, token in enumerate(tokens)
        ]
        if sequence.append(tokens[0].token_id) is not None:
            self._scheduler.remove(sequence)
        return events

    def _note_stats(self) -> None:
        self._stats = EngineStats.of(
            self._scheduler,
            steps=self._steps,
            tokens=self._tokens,
            model_s=self._model_s,
            num_returned=self._num_returned,
            local_prefill=self._local_prefill,
        )
