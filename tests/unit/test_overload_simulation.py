"""The queue under three times its workers' capacity, in virtual time: who is let in is served."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from admission_scene import Pool, Scene, View, settle

from legato.cluster.deadline import Deadline
from legato.cluster.errors import RequestError
from legato.cluster.policies import Demand

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.attempt_placement import Placement

TICK_S = 0.25
PROMPT, OUTPUT = (16, 128), (16, 48)
PREFILL_TOKEN_S, STEP_S = 0.0005, 0.02
NUM_ROWS = 16 * 100  # KV of the decode worker: about 16 requests


@dataclass
class Request:
    """One of the trace, and what became of it."""

    prompt: int
    output: int
    batch: bool
    sent_s: float
    deadline_s: float
    ended_s: float | None = None
    finished: bool = False
    refused: RequestError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Simulation:
    """One prefill and one decode worker behind the queue."""

    def __init__(self, seed: int) -> None:
        self.scene = Scene(Pool(decode=[View("d", NUM_ROWS)]))
        self.dice = random.Random(seed)
        self.requests: list[Request] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    async def run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self.scene.now, _, action = heapq.heappop(self._events)
            action()
            await settle()
        self.scene.now = end_s

    def tick(self) -> None:
        self.scene.queue.dispatch()
        self.at(self.scene.now + TICK_S, self.tick)

    def draw(self, patience_s: tuple[float, float], batch_share: float) -> Request:
        batch = self.dice.random() < batch_share
        now = self.scene.now
        return Request(
            self.dice.randint(*PROMPT),
            self.dice.randint(*OUTPUT),
            batch,
            now,
            now + patience_s[batch],
        )

    def send(self, request: Request, then: Callable[[], None] = lambda: None) -> None:
        """`then` when it has ended."""
        self.requests.append(request)
        queue, scene = self.scene.queue, self.scene
        demand = Demand(request.prompt, request.prompt + request.output - 1, batch=request.batch)
        entry = queue.enter(1, Deadline(request.deadline_s, given=True))[0]

        async def live() -> None:
            try:
                queue.check_arrival(demand, demand, Deadline(request.deadline_s, given=True))
                placement = await queue.place(entry, demand, first=True)
            except RequestError as error:
                request.ended_s, request.refused = scene.now, error
                then()
                return
            placement.granted()
            self._serve(request, placement, then)

        request.task = asyncio.create_task(live())
        self.at(request.deadline_s, lambda: self._expire(request))

    def _expire(self, request: Request) -> None:
        if request.ended_s is None and request.task is not None:
            request.ended_s = self.scene.now
            request.task.cancel()

    def _serve(self, request: Request, placement: Placement, then: Callable[[], None]) -> None:
        """The prompts are computed one after the other; a step takes longer beside more others."""
        scene, view = self.scene, self.scene.pool.prefill[0]
        start_s = view.backlog_tokens * PREFILL_TOKEN_S + 0.005
        num_running = len(self._running())
        token_s = STEP_S * (0.5 + num_running / 16) * self.dice.uniform(0.9, 1.1)
        placed_s = scene.now

        def first_token() -> None:
            placement.computed()
            placement.handed_over()
            scene.queue.times.note_start(scene.now - placed_s)

        def end() -> None:
            scene.queue.times.note_output(request.output, token_s * request.output)
            scene.queue.times.note_length(request.output, request.output)
            request.finished = request.ended_s is None
            if request.ended_s is None:
                request.ended_s = scene.now
            placement.release()
            then()

        request.task = None
        self.at(placed_s + start_s, first_token)
        self.at(placed_s + start_s + token_s * request.output, end)

    def _running(self) -> list[Request]:
        return [r for r in self.requests[-400:] if r.task is None and r.ended_s is None]


@dataclass(frozen=True)
class Figures:
    peak: float
    goodput: float
    tokens_ratio: float  # of tokens in the same way
    batch_done: int
    refused: list[Request]
    late: int
    recovery_s: float


async def flood(
    seed: int,
    *,
    factor: float = 3.0,
    seconds: float = 60.0,
    batch_share: float = 0.3,
    patience_s: tuple[float, float] = (3.0, 9.0),
) -> Figures:
    """A closed loop for the peak, then the flood, then one request after the other."""
    sim = Simulation(seed)
    sim.tick()
    peak_s = 20.0

    def again() -> None:
        if sim.scene.now < peak_s:
            sim.send(sim.draw((300.0, 300.0), batch_share), again)

    for _ in range(32):
        again()
    await sim.run_until(peak_s)
    best = [r for r in sim.requests if r.finished and (r.ended_s or 0.0) >= 5.0]
    peak = len(best) / (peak_s - 5.0)
    peak_tokens = sum(r.output for r in best) / (peak_s - 5.0)
    await sim.run_until(peak_s + 10.0)
    began_s, ended_s = peak_s + 10.0, peak_s + 10.0 + seconds

    def arrive() -> None:
        if sim.scene.now < ended_s:
            sim.send(sim.draw(patience_s, batch_share))
            sim.at(sim.scene.now + sim.dice.expovariate(factor * peak), arrive)

    sim.requests.clear()
    sim.at(began_s, arrive)
    await sim.run_until(ended_s)
    flooded = list(sim.requests)
    normal: list[Request] = []

    def next_normal() -> None:
        normal.append(sim.draw((60.0, 60.0), 0.0))
        sim.send(normal[-1], next_normal if len(normal) < 40 else lambda: None)

    next_normal()
    await sim.run_until(ended_s + 60.0)
    done = [r for r in flooded if r.finished and began_s + 1.0 <= (r.ended_s or 0) < ended_s]
    return Figures(
        peak=peak,
        goodput=len(done) / (seconds - 1.0),
        tokens_ratio=sum(r.output for r in done) / (seconds - 1.0) / peak_tokens,
        batch_done=sum(r.batch for r in done),
        refused=[r for r in flooded if r.refused is not None],
        late=sum(not r.finished and r.refused is None for r in flooded),
        recovery_s=next(
            r.sent_s - ended_s for r in normal if r.finished and (r.ended_s or 0) - r.sent_s < 2.0
        ),
    )


async def test_a_flood_costs_no_goodput() -> None:
    figures = await flood(1)
    held_s = sorted((r.ended_s or 0.0) - r.sent_s for r in figures.refused)
    print(
        f"peak {figures.peak:.1f}/s, goodput {figures.goodput:.1f}/s, tokens "
        f"{figures.tokens_ratio:.2f} of the peak's, {len(held_s)} refused, {figures.late} late, "
        f"{sum(s > 0.05 for s in held_s)} refused late, normal after {figures.recovery_s:.2f} s"
    )
    assert len(held_s) > 1000, "the load was no flood"
    assert figures.goodput >= 0.9 * figures.peak
    assert figures.tokens_ratio >= 0.9
    assert held_s[len(held_s) * 99 // 100] <= 0.05
    assert figures.late <= 0.01 * len(held_s)
    assert figures.batch_done > 0
    assert figures.recovery_s <= 5.0
    hints_ms = [r.refused.retry_after_ms or 0 for r in figures.refused if r.refused is not None]
    assert min(hints_ms) >= 100


async def test_a_load_that_fits_is_refused_nothing() -> None:
    figures = await flood(1, factor=0.7, seconds=30.0)
    assert figures.refused == []
    assert figures.late == 0
    assert figures.goodput >= 0.6 * figures.peak


async def test_without_deadlines_the_queue_takes_what_its_bounds_allow() -> None:
    figures = await flood(1, seconds=8.0, batch_share=0.0, patience_s=(600.0, 600.0))
    assert figures.refused == []
