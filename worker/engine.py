"""Engine: one thread that repeats schedule → run → commit for one scheduler."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from legato.worker.mailbox import BrokenEvent, EngineDiedError, JoinedEvent, Mailbox, TokenEvent
from legato.worker.model_runner import ModelRunner
from legato.worker.sampler import SamplingRow
from legato.worker.sequence import FinishReason
from legato.worker.unread import UnreadTokens

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.worker.forward import Model
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.cache import KvCache
    from legato.worker.logits import Logits
    from legato.worker.mailbox import EngineEvent
    from legato.worker.sampler import PendingTokens, Sampled
    from legato.worker.scheduling.step import Scheduler, Step
    from legato.worker.sequence import Sequence

    SampleFunction = Callable[[Logits, SequenceOf[SamplingRow]], PendingTokens]

_log = logging.getLogger(__name__)
# The engine is woken by every command; this only bounds the wait.
_IDLE_WAIT_S = 1.0
# So many steps in a row without one usable row of logits are the engine's fault, not its
# requests'. Few, for each of them ends all its sequences; not one, for a prompt may be alone.
_BROKEN_STEPS_LIMIT = 4


@dataclass(frozen=True)
class EngineStats:
    """Gauges and counters at one moment."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _StepNow:
    started_at_s: float
    num_tokens: int


@dataclass(frozen=True)
class _InFlight:
    """A step that was started; its tokens are still to be read."""

    step: Step
    sequences: list[Sequence]  # those of the parts that sample
    sampled: PendingTokens | None  # None: no part samples
    leases: list[BlockLease]  # pinned until it is finished
    started_at_s: float
    model_s: float  # until the logits were there, or were on their way


@dataclass(frozen=True)
class _Submit:
    sequence: Sequence
    mailbox: Mailbox


@dataclass(frozen=True)
class _Release:
    sequence: Sequence


class Engine:
    """Runs the model. Commands come in through a queue that the thread empties between two steps;
    events go out to the event loop's mailboxes, in one call per step.

    Whatever goes wrong in a step is the engine's own fault, since requests are validated before
    they come here: it is fatal, every mailbox fails and `on_failure` is called on the loop. A
    sequence whose logits are NaN or infinite (an fp16 model may overflow on one prompt) ends alone,
    unless `_BROKEN_STEPS_LIMIT` is reached.
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
    ) -> None:
        """`overlap`: start a step before the tokens of the last are read; None: on CUDA."""
        self._runner = ModelRunner(model, cache, device, max_batch_size)
        self._scheduler = scheduler
        self._sample = sample
        self._overlaps = device.type == "cuda" if overlap is None else overlap
        self._loop = loop
        self._on_failure = on_failure
        self._counts_prompts = counts_prompt_tokens
        self._changed = threading.Condition()
        # Guarded by _changed, which is never held during a forward pass:
        self._commands: list[_Submit | _Release] = []
        self._stats = EngineStats()
        self._stopping = False
        # Of the engine thread:
        self._mailboxes: dict[Sequence, Mailbox] = {}
        self._steps = 0
        self._tokens = 0
        self._broken_steps = 0  # in a row
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
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, sequence: Sequence) -> Mailbox:
        """Queues a sequence. Every submitted one must be released, once, by its caller."""
        mailbox = Mailbox()
        if self._failure is not None:
            mailbox.fail(self._failure)
            return mailbox
        sequence.submitted_at_s = time.perf_counter()
        self._open.add(mailbox)
        self._command(_Submit(sequence, mailbox))
        return mailbox

    def release(self, sequence: Sequence, mailbox: Mailbox) -> None:
        """Takes the sequence out before the next step and ends its hold on its blocks."""
        self._open.discard(mailbox)
        self._command(_Release(sequence))

    def stats(self) -> EngineStats:
        """As of the last step, plus the sequences that came in since."""
        with self._changed:
            stats = self._stats
            new = [c.sequence for c in self._commands if isinstance(c, _Submit)]
        return EngineStats(
            waiting=stats.waiting + len(new),
            running=stats.running,
            waiting_tokens=stats.waiting_tokens
            + (sum(len(s.token_ids) for s in new) if self._counts_prompts else 0),
            steps=stats.steps,
            tokens=stats.tokens,
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

    def _command(self, command: _Submit | _Release) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    # Called on the engine thread.

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._loop_over_steps()
        except BaseException as error:  # reported below: nothing is swallowed
            _log.critical("the engine failed", exc_info=error)
            self._call_loop(self.fail, error)

    def _loop_over_steps(self) -> None:
        """Where steps overlap, the next one is scheduled and started before the tokens of the one
        under way are read; a sequence that turns out to have ended wastes its row of one step.
        """
        flight: _InFlight | None = None
        while True:
            if flight is not None and any(s.params.reads_output for s in flight.sequences):
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
        with self._changed:
            while not self._stopping:
                commands, self._commands = self._commands, []
                for command in commands:
                    self._apply(command)
                step = self._scheduler.schedule()
                self._note_stats()
                if step is not None or not wait:
                    return step
                self._changed.wait_for(lambda: self._commands or self._stopping, _IDLE_WAIT_S)
            return None

    def _apply(self, command: _Submit | _Release) -> None:
        sequence = command.sequence
        if isinstance(command, _Submit):
            self._mailboxes[sequence] = command.mailbox
            self._scheduler.add(sequence)
            return
        self._mailboxes.pop(sequence, None)
        self._scheduler.remove(sequence)
        if sequence.lease is not None:
            sequence.lease.release()

    def _launch(self, step: Step, before: _InFlight | None) -> _InFlight:
        """Starts a step. On a device this returns while the device computes."""
        started_at_s = time.perf_counter()
        self._step_now = _StepNow(started_at_s, step.num_tokens)
        for sequence in step.joined:
            sequence.first_step_at_s = started_at_s
        if step.joined:
            self._publish([(s, JoinedEvent()) for s in step.joined])
        leases = []
        for part in step.parts:
            lease = part.sequence.lease
            assert lease is not None, "scheduled without blocks"
            lease.acquire_again()  # the device writes there, whatever becomes of the sequence
            leases.append(lease)

        unread = None
        if before is not None and before.sampled is not None:
            unread = UnreadTokens(before.sequences, before.sampled.token_ids)
        logits = self._runner.forward(step, unread)
        model_s = time.perf_counter() - started_at_s
        sequences = [part.sequence for part in step.parts if part.samples]
        sampled = (
            self._sample(logits, [SamplingRow.of(s) for s in sequences]) if sequences else None
        )
        self._scheduler.commit(step)
        for sequence in sequences:
            sequence.num_unread += 1
        return _InFlight(step, sequences, sampled, leases, started_at_s, model_s)

    def _finish(self, flight: _InFlight) -> None:
        """Waits for a step's tokens and hands them out."""
        tokens = flight.sampled.collect() if flight.sampled is not None else []
        assert len(tokens) == len(flight.sequences), "the sampler lost a row"
        model_s = flight.model_s
        if self._overlaps:
            if flight.sampled is None:  # nothing was read, so nothing was waited for
                self._runner.wait()
            # Steps follow each other without a gap: this one had the device since the last.
            now_s = time.perf_counter()
            model_s = now_s - max(flight.started_at_s, self._finished_at_s)
            self._finished_at_s = now_s
        for lease in flight.leases:
            lease.drop()
        for part in flight.step.parts:
            part.sequence.num_forwards += 1
            part.sequence.model_s += model_s
        wanted = []
        for sequence, token in zip(flight.sequences, tokens, strict=True):
            sequence.num_unread -= 1
            # One that ended, or was released, while this step was under way has no use for it.
            if sequence in self._mailboxes and sequence.finish_reason is None:
                wanted.append((sequence, token))
        self._count_broken([token for _, token in wanted])
        events = [(sequence, self._append(sequence, token)) for sequence, token in wanted]
        self._steps += 1
        self._tokens += flight.step.num_tokens
        with self._changed:
            self._note_stats()
        self._publish(events)

    def _count_broken(self, tokens: SequenceOf[Sampled | None]) -> None:
        if not tokens:  # a prompt's chunk that is not the last says nothing
            return
        self._broken_steps = 0 if any(tokens) else self._broken_steps + 1
        if self._broken_steps >= _BROKEN_STEPS_LIMIT:
            raise FloatingPointError(
                f"all logits of {self._broken_steps} steps in a row were NaN or infinite "
                f"(limit {_BROKEN_STEPS_LIMIT})"
            )

    def _append(self, sequence: Sequence, sampled: Sampled | None) -> TokenEvent | BrokenEvent:
        index = sequence.num_output_tokens
        if sampled is None:
            _log.warning("a request ends: no usable logits at output position %d", index)
            sequence.finish_reason = FinishReason.BROKEN
            self._scheduler.remove(sequence)
            return BrokenEvent(index)
        finish_reason = sequence.append(sampled.token_id)
        if finish_reason is not None:
            self._scheduler.remove(sequence)
        assert sequence.first_step_at_s is not None
        return TokenEvent(
            sampled=sampled,
            index=index,
            finish_reason=finish_reason,
            num_forwards=sequence.num_forwards,
            model_s=sequence.model_s,
            wait_s=sequence.first_step_at_s - sequence.submitted_at_s,
        )

    def _note_stats(self) -> None:
        self._stats = EngineStats(
            waiting=self._scheduler.num_waiting,
            running=self._scheduler.num_running,
            waiting_tokens=self._scheduler.num_waiting_tokens,
            steps=self._steps,
            tokens=self._tokens,
        )

    def _publish(self, events: SequenceOf[tuple[Sequence, EngineEvent]]) -> None:
        """Hands all events over in one call: a wake-up of the loop costs more than an event."""
        if events:
            self._call_loop(_deliver, [(self._mailboxes[s], event) for s, event in events])

    def _call_loop(self, function: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody is left to be told.
            _log.warning("the engine outlived the event loop")


def _deliver(events: list[tuple[Mailbox, EngineEvent]]) -> None:
    for mailbox, event in events:
        mailbox.put(event)
