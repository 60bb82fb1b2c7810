"""Engine: one thread that repeats schedule → run → commit for one scheduler."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from legato.worker.mailbox import EngineDiedError, JoinedEvent, Mailbox, TokenEvent
from legato.worker.model_runner import ModelRunner
from legato.worker.sampler import SamplingRow

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

    from legato.worker.forward import Model
    from legato.worker.kv.cache import KvCache
    from legato.worker.mailbox import EngineEvent
    from legato.worker.sampler import Sampled
    from legato.worker.scheduling.step import Scheduler, Step
    from legato.worker.sequence import Sequence

    SampleFunction = Callable[[Tensor, SequenceOf[SamplingRow]], list[Sampled]]

_log = logging.getLogger(__name__)
# The engine is woken by every command; this only bounds the wait.
_IDLE_WAIT_S = 1.0


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
    they come here: it is fatal, every mailbox fails and `on_failure` is called on the loop.
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
    ) -> None:
        self._runner = ModelRunner(model, cache, device, max_batch_size)
        self._scheduler = scheduler
        self._sample = sample
        self._device = device
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
                while (step := self._next_step()) is not None:
                    self._run(step)
        except BaseException as error:  # reported below: nothing is swallowed
            _log.critical("the engine failed", exc_info=error)
            self._call_loop(self.fail, error)

    def _next_step(self) -> Step | None:
        """Applies commands and schedules; waits while nothing can run. None: time to end."""
        with self._changed:
            while not self._stopping:
                commands, self._commands = self._commands, []
                for command in commands:
                    self._apply(command)
                step = self._scheduler.schedule()
                self._note_stats()
                if step is not None:
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

    def _run(self, step: Step) -> None:
        started_at_s = time.perf_counter()
        self._step_now = _StepNow(started_at_s, step.num_tokens)
        for sequence in step.joined:
            sequence.first_step_at_s = started_at_s
        if step.joined:
            self._publish([(s, JoinedEvent()) for s in step.joined])

        logits = self._runner.forward(step)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        model_s = time.perf_counter() - started_at_s
        sampling = [part.sequence for part in step.parts if part.samples]
        sampled = self._sample(logits, [_row(s) for s in sampling]) if sampling else []
        assert len(sampled) == len(sampling), "the sampler lost a row"

        self._scheduler.commit(step)
        for part in step.parts:
            part.sequence.num_forwards += 1
            part.sequence.model_s += model_s
        events = [(s, self._append(s, token)) for s, token in zip(sampling, sampled, strict=True)]
        self._steps += 1
        self._tokens += step.num_tokens
        with self._changed:
            self._note_stats()
        self._step_now = None
        self._publish(events)

    def _append(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        index = sequence.num_output_tokens
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


def _row(sequence: Sequence) -> SamplingRow:
    return SamplingRow(
        params=sequence.params,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        banned_token_ids=sequence.banned_token_ids,
    )
