"""ScalingWorld: queues and workers in virtual time, under the real controller and autoscaler.

Prefill workers compute one prompt after the other; decode workers give every sequence of the batch
a token each `itl_s`, which grows with the batch, and hold its KV until it ends. What a router would
report is read off once a second.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.cluster.autoscale_loop import AutoscaleLoop
from legato.cluster.controller import Controller, StartedWorker
from legato.cluster.load_window import LoadWindow
from legato.cluster.pool import ControllerOptions
from legato.cluster.router_load import RouterLoad, WorkerFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from legato.cluster.autoscale_options import AutoscaleOptions
    from legato.cluster.control_plane import Role, WorkerEndpoint
    from legato.cluster.pool_pressure import PoolSize

TICK_S = 0.2
BLOCK_TOKENS = 16
MAX_QUEUED = 1024  # requests; as RouterOptions has it


@dataclass(frozen=True)
class Machine:
    """What one worker can do."""

    prefill_tokens_per_s: float = 3000.0
    decode_blocks: int = 1000
    step_s: float = 0.010  # of a batch of one
    sequence_s: float = 0.0008  # that each further one adds to the step
    start_s: float = 5.0

    def itl_s(self, batch: int) -> float:
        return self.step_s + self.sequence_s * batch


@dataclass(frozen=True)
class Load:
    """Poisson arrivals; lengths are exponential about their means."""

    requests_per_s: float
    prompt_tokens: float = 500.0
    answer_tokens: float = 100.0


@dataclass
class Request:
    arrived_s: float
    prompt: int
    answer: int
    begun: bool = False


@dataclass
class PrefillWorker:
    now: Request | None = None
    left: float = 0.0
    computed: float = 0.0
    model_s: float = 0.0
    draining: bool = False


@dataclass
class DecodeWorker:
    """`steps` so far; a sequence ends at a step. Its KV has `steps + offset` tokens."""

    steps: float = 0.0
    ends: list[tuple[float, int, Request]] = field(default_factory=list)
    offsets: dict[int, float] = field(default_factory=dict)
    offset_sum: float = 0.0
    draining: bool = False

    def used_blocks(self) -> int:
        return int((self.offset_sum + len(self.offsets) * self.steps) / BLOCK_TOKENS)

    def add(self, number: int, request: Request) -> None:
        offset = request.prompt - self.steps
        self.offsets[number] = offset
        self.offset_sum += offset
        heapq.heappush(self.ends, (self.steps + request.answer, number, request))

    def end_finished(self) -> None:
        while self.ends and self.ends[0][0] <= self.steps:
            _, number, _ = heapq.heappop(self.ends)
            self.offset_sum -= self.offsets.pop(number)


class ScalingWorld:
    """`run` goes on until a moment; a Launcher, and what the loop sets targets through."""

    def __init__(
        self,
        options: AutoscaleOptions,
        load: Load,
        *,
        machine: Machine | None = None,
        seed: int = 0,
        fails: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.options, self.load, self.machine = options, load, machine or Machine()
        self.dice = random.Random(seed)
        self.fails = fails
        self.now_s = 0.0
        self.prefills: dict[str, PrefillWorker] = {}
        self.decodes: dict[str, DecodeWorker] = {}
        self.starting: dict[str, tuple[float, Role]] = {}
        self.num_starts = 0
        self.queue: deque[Request] = deque()
        self.joining: deque[Request] = deque()  # computed, and without room in decode
        self.window = LoadWindow()
        self.ttfts: list[tuple[float, float]] = []  # (arrived, TTFT)
        self.itls: list[tuple[float, float]] = []  # (at, ITL of a worker)
        self.changes: list[tuple[float, Role, int, int]] = []  # (at, pool, before, after)
        self.sizes: list[tuple[float, int, int]] = []  # (at, ready prefill, ready decode)
        self.num_moved = 0
        self.num_refused = 0
        self._number = 0
        self._endpoints: tuple[WorkerEndpoint, ...] = ()
        targets: dict[Role, int] = {
            "prefill": options.prefill.min_workers,
            "decode": options.decode.min_workers,
        }
        self.controller = Controller(self, self._publish, targets, ControllerOptions())
        self.loop = AutoscaleLoop(options, self, 0.0)
        self.controller.step(0.0)

    # --- what the loop works on ---------------------------------------------------------------

    def size_of(self, role: Role) -> PoolSize:
        return self.controller.size_of(role)

    def ready_ids(self, role: Role) -> tuple[str, ...]:
        return self.controller.ready_ids(role)

    def set_targets(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        for role, after in targets.items():
            self.changes.append((now_s, role, self.size_of(role).target, after))
        return self.controller.set_targets(targets, now_s)

    # --- a launcher ---------------------------------------------------------------------------

    def start(self, name: str, role: Role) -> None:
        self.num_starts += 1
        self.starting[name] = self.now_s + self.machine.start_s, role

    def drain(self, name: str, timeout_s: float) -> None:
        worker = self.prefills.get(name) or self.decodes[name]
        worker.draining = True

    def kill(self, name: str) -> None:
        self.starting.pop(name, None)
        prefill, decode = self.prefills.pop(name, None), self.decodes.pop(name, None)
        lost = [prefill.now] if prefill is not None and prefill.now is not None else []
        if decode is not None:
            lost += [request for _, _, request in decode.ends]
        self.num_moved += len(lost)
        self.queue.extendleft(lost)

    def lacks_room(self, name: str) -> bool:
        return False

    def waiting_for(self, name: str) -> str:
        return ""

    def _publish(self, endpoints: tuple[WorkerEndpoint, ...]) -> None:
        self._endpoints = endpoints

    # --- time ---------------------------------------------------------------------------------

    def run(self, until_s: float) -> None:
        next_report_s, next_step_s = self.now_s + 1.0, self.now_s + 0.5
        while self.now_s < until_s:
            self.now_s += TICK_S
            self._tick()
            if self.now_s >= next_report_s:
                next_report_s += 1.0
                self.loop.note_load(self._report(), self.now_s)
            if self.now_s >= next_step_s:
                next_step_s += 0.5
                self.controller.step(self.now_s)
            self.loop.step(self.now_s)
            ready = self.size_of("prefill").ready, self.size_of("decode").ready
            if not self.sizes or self.sizes[-1][1:] != ready:
                self.sizes.append((self.now_s, *ready))

    def _tick(self) -> None:
        for name, (at_s, role) in tuple(self.starting.items()):
            if self.now_s >= at_s:
                del self.starting[name]
                if self.fails(name):
                    self.controller.on_dead(name, "it does not start", self.now_s)
                    continue
                if role == "prefill":
                    self.prefills[name] = PrefillWorker()
                else:
                    self.decodes[name] = DecodeWorker()
                started = StartedWorker(name, "127.0.0.1:1", 1, "here")
                self.controller.on_ready(name, started, self.now_s)
        self._arrive()
        for name, prefill in tuple(self.prefills.items()):
            self._prefill(prefill)
            if prefill.draining and prefill.now is None:
                self.controller.on_drained(name, self.now_s)
        self._join()
        for name, decode in tuple(self.decodes.items()):
            self._decode(decode)
            if decode.draining and not decode.ends:
                self.controller.on_drained(name, self.now_s)

    def _arrive(self) -> None:
        at_s = self.now_s - TICK_S
        while self.load.requests_per_s:
            at_s += self.dice.expovariate(self.load.requests_per_s)
            if at_s > self.now_s:
                return
            if len(self.queue) >= MAX_QUEUED:
                self.num_refused += 1
                continue
            prompt = 1 + int(self.dice.expovariate(1 / self.load.prompt_tokens))
            answer = 1 + int(self.dice.expovariate(1 / self.load.answer_tokens))
            self.queue.append(Request(at_s, min(prompt, 8000), min(answer, 4000)))

    def _prefill(self, worker: PrefillWorker) -> None:
        budget_s = TICK_S
        speed = self.machine.prefill_tokens_per_s * self.dice.uniform(0.9, 1.1)
        while budget_s > 0:
            # A ticket first: none is computed without room for it in decode.
            if worker.now is None:
                if len(self.joining) > 2:
                    self._join()
                if worker.draining or not self.queue or len(self.joining) > 2:
                    return
                worker.now = self.queue.popleft()
                worker.left = worker.now.prompt
            took_s = min(budget_s, worker.left / speed)
            worker.left -= took_s * speed
            worker.computed += took_s * speed
            worker.model_s += took_s
            budget_s -= took_s
            if worker.left <= 1e-6:
                if not worker.now.begun:
                    worker.now.begun = True
                    ttft_s = max(0.0, self.now_s - budget_s - worker.now.arrived_s)
                    self.ttfts.append((worker.now.arrived_s, ttft_s))
                    self.window.note_first_token(ttft_s)
                self.joining.append(worker.now)
                worker.now = None

    def _join(self) -> None:
        while self.joining:
            request = self.joining[0]
            blocks = (request.prompt + request.answer) // BLOCK_TOKENS + 1
            workers = [w for w in self.decodes.values() if not w.draining]
            free = [(self.machine.decode_blocks - w.used_blocks(), w) for w in workers]
            room, worker = max(free, key=lambda one: one[0], default=(0, None))
            if worker is None or blocks > room:
                return
            self._number += 1
            worker.add(self._number, self.joining.popleft())

    def _decode(self, worker: DecodeWorker) -> None:
        batch = len(worker.ends)
        if not batch:
            return
        itl_s = self.machine.itl_s(batch) * self.dice.uniform(0.9, 1.1)
        worker.steps += TICK_S / itl_s
        self.window.note_tokens(TICK_S * batch, int(batch * TICK_S / itl_s))
        self.itls.append((self.now_s, itl_s))
        worker.end_finished()

    def _report(self) -> RouterLoad:
        blocked = len(self.joining) > 2
        queued = [*self.joining, *self.queue] if blocked else []
        prefills = [
            WorkerFigures(name, "prefill", 0, 1000, 0, 0, int(worker.computed), worker.model_s)
            for name, worker in self.prefills.items()
            if not worker.draining
        ]
        decodes = [
            WorkerFigures(
                name, "decode", 0, self.machine.decode_blocks, worker.used_blocks(),
                len(worker.ends),
            )
            for name, worker in self.decodes.items()
            if not worker.draining
        ]  # fmt: skip
        return RouterLoad(
            router_id="router",
            window=self.window.close_slot(self.now_s),
            queued_for_prefill=0 if blocked else len(self.queue),
            queued_prefill_tokens=0 if blocked else sum(r.prompt for r in self.queue),
            queued_for_decode=len(queued),
            queued_decode_blocks=sum(r.prompt // BLOCK_TOKENS + 1 for r in queued),
            workers=(*prefills, *decodes),
        )
