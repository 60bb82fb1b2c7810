"""SimulatedEngine: schedule → run → commit of one worker, in virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from legato.worker.engine_stats import EngineStats
from legato.worker.local_prefill import LocalPrefill
from legato.worker.scheduling.step import Step

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from legato.plan.simulation.measures import Measures
    from legato.worker.scheduling.step import Scheduler
    from legato.worker.sequence import Sequence

StepT = TypeVar("StepT", bound=Step)


class PoolBusy:
    """How many workers of a pool compute: those of the other pool are slower meanwhile, where all
    are on one machine.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_computing = 0
        self._num_workers = num_workers

    def slowed(self, factor: float) -> float:
        """By how much, now."""
        return 1.0 + (factor - 1.0) * self.num_computing / self._num_workers


class SimulatedEngine(ABC, Generic[StepT]):
    """What the engine's thread does, without overlap: whatever comes during a step is taken up when
    it ends. A pool's own subclass says how long a step takes, and what comes of it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        measures: Measures,
        own: PoolBusy,
    ) -> None:
        self.scheduler = scheduler
        self.busy_s = 0.0  # of the time that is measured
        self._loop = loop
        self._measures = measures
        self._own = own
        self._commands: list[Callable[[], None]] = []
        self._due = False  # a look at what to do next
        self._computing = False
        self._submitted: list[Sequence] = []  # not known to the scheduler yet
        self._steps = self._tokens = self._num_returned = 0
        self._model_s = 0.0
        self._local = LocalPrefill()

    @property
    def local(self) -> LocalPrefill:
        """What computing prompts has cost here."""
        return self._local

    def tell(self, command: Callable[[], None]) -> None:
        """To be done between two steps."""
        self._commands.append(command)
        self.wake()

    def submit(self, sequence: Sequence) -> None:
        """A sequence comes in."""
        sequence.submitted_at_s = self._loop.time()
        self._submitted.append(sequence)
        self.tell(lambda: self._add(sequence))

    def wake(self) -> None:
        """There may be something to do."""
        if not self._due and not self._computing:
            self._due = True
            self._loop.call_soon(self._go_on)

    def stats(self, *, counts_prompts: bool) -> EngineStats:
        """As `Engine.stats`."""
        stats = EngineStats.of(
            self.scheduler,
            steps=self._steps,
            tokens=self._tokens,
            model_s=self._model_s,
            num_returned=self._num_returned,
            local_prefill=self._local,
        )
        if not self._submitted:
            return stats
        tokens = sum(len(s.token_ids) for s in self._submitted) if counts_prompts else 0
        return replace(
            stats,
            waiting=stats.waiting + len(self._submitted),
            waiting_tokens=stats.waiting_tokens + tokens,
        )

    def _add(self, sequence: Sequence) -> None:
        self._submitted.remove(sequence)
        self.scheduler.add(sequence)

    def _go_on(self) -> None:
        self._due = False
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        now = self._loop.time()
        step = self._schedule(now)
        if step is None:
            return
        self._computing = True
        self._own.num_computing += 1
        for part in step.parts:
            if part.sequence.first_step_at_s is None:
                part.sequence.first_step_at_s = now
                self._note_joined(part.sequence)
        seconds = self._seconds(step) if step.parts else 0.0
        self._loop.call_at(now + seconds, self._end_step, step, now, seconds)

    def _end_step(self, step: StepT, began_s: float, seconds: float) -> None:
        self._computing = False
        self._own.num_computing -= 1
        self._steps += 1 if step.parts else 0
        self._tokens += step.num_tokens
        self._model_s += seconds
        self.busy_s += self._measures.measured_s(began_s, began_s + seconds)
        self._finish(step, seconds)
        self.wake()

    def _note_joined(self, sequence: Sequence) -> None:
        """A sequence is in a step for the first time."""

    @abstractmethod
    def _schedule(self, now: float) -> StepT | None:
        """The next step of the scheduler, if there is anything to do."""

    @abstractmethod
    def _seconds(self, step: StepT) -> float:
        """How long the step takes."""

    @abstractmethod
    def _finish(self, step: StepT, seconds: float) -> None:
        """What comes of a step that has ended."""
