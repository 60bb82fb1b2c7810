"""Pool: the workers of one role, target against current, and the rule that closes the gap."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.autoscale_options import AutoscaleOptions
    from legato.cluster.control_plane import Role, WorkerEndpoint

MAX_POOL_SIZE = 1024


class WorkerState(Enum):
    """A worker's life: forwards only. A draining worker never takes new work again."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"

    def to(self, state: WorkerState) -> WorkerState:
        """Returns `state`; raises ValueError where no worker may go there from here."""
        if state not in _NEXT_STATES[self]:
            raise ValueError(f"a {self.value} worker cannot become {state.value}")
        return state


_NEXT_STATES = {
    WorkerState.STARTING: (WorkerState.READY, WorkerState.DEAD),
    WorkerState.READY: (WorkerState.DRAINING, WorkerState.DEAD),
    WorkerState.DRAINING: (WorkerState.DEAD,),
    WorkerState.DEAD: (),
}


@dataclass(frozen=True)
class ControllerOptions:
    """Bounds of the controller; times in seconds."""

    start_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    # Beyond the drain's own bound, for its answer to arrive.
    drain_slack_s: float = 5.0
    # A worker that dies sooner than this after becoming ready counts as a failed start: one that
    # crashes on its first request would otherwise be replaced for ever at full speed.
    early_life_s: float = 5.0
    max_failed_starts: int = 3
    # Of one pool, at the same time: each loads a model, and who asks for a thousand workers by
    # mistake is to find the controller still answering.
    max_starting: int = 32
    backoff_s: float = 0.5  # after the first failed start; doubled after each further one
    # After `max_failed_starts` in a row of workers that never were ready. Those that were may have
    # been struck by chance: for them it is only where the doubling ends.
    pause_s: float = 30.0
    restart: bool = True  # False: a worker that is lost is not replaced until somebody scales
    autoscale: AutoscaleOptions | None = None  # None: only an operator changes targets


@dataclass
class WorkerRecord:
    """One worker as the controller knows it. `since_s` is when the present state began."""

    name: str
    role: Role
    state: WorkerState
    since_s: float
    endpoint: WorkerEndpoint | None = None  # known once ready
    pid: int = 0
    host: str = ""
    becomes: Role | None = None  # once it has drained
    leaves: bool = False  # it is to drain as soon as another is ready in its place
    predecessor: str = ""  # its id in another role

    @property
    def known_id(self) -> str:
        """As others know it, once it serves."""
        return self.endpoint.worker_id if self.endpoint else self.name

    def move(self, state: WorkerState, now_s: float) -> None:
        """Enters `state`; raises ValueError where that is no way to go."""
        self.state = self.state.to(state)
        self.since_s = now_s


@dataclass
class Pool:
    """Workers by name, oldest first, and what is remembered of those that failed."""

    role: Role
    target: int
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    failed_starts: int = 0  # in a row
    blamed: list[str] = field(default_factory=list)  # the workers behind them
    last_failure_s: float = 0.0
    next_start_s: float = 0.0  # no start before this moment
    last_failure: str = ""
    failure_is_permanent: bool = False  # the model or the settings are wrong: trying helps nothing
    num_lost: int = 0  # and not to be replaced

    def in_state(self, *states: WorkerState) -> list[WorkerRecord]:
        """Those in one of `states`, oldest first."""
        return [worker for worker in self.workers.values() if worker.state in states]

    def remove(self, worker: WorkerRecord, now_s: float) -> None:
        """The worker is no more."""
        worker.move(WorkerState.DEAD, now_s)
        del self.workers[worker.name]

    def note_end(
        self,
        worker: WorkerRecord,
        reason: str,
        now_s: float,
        options: ControllerOptions,
        *,
        failed: bool,
        permanent: bool,
    ) -> None:
        """What the end of a worker says of the next start; to be called before `remove`.

        `failed`: it counts as a failed start; `permanent`: the next one would fail as well.
        """
        was_ready = worker.state is WorkerState.READY
        if failed:
            self._note_failed_start(
                worker.name, reason, now_s, options, was_ready=was_ready, permanent=permanent
            )
        elif was_ready:
            self.note_success()  # it lived long: the replacement starts at once
        if not options.restart and (failed or was_ready):
            self.num_lost += 1
            self.last_failure = f"{worker.name}: {reason}"

    def _note_failed_start(
        self,
        name: str,
        reason: str,
        now_s: float,
        options: ControllerOptions,
        *,
        was_ready: bool,
        permanent: bool,
    ) -> None:
        """Counts one, and sets when the next start may be."""
        self.failed_starts += 1
        self.blamed.append(name)
        self.last_failure = f"{name}: {reason}"
        self.last_failure_s = now_s
        self.failure_is_permanent = permanent
        wait_s = min(options.backoff_s * 2.0 ** min(self.failed_starts - 1, 32), options.pause_s)
        if permanent or (not was_ready and self.failed_starts >= options.max_failed_starts):
            wait_s = options.pause_s
        self.next_start_s = now_s + wait_s

    def note_success(self) -> None:
        """Forgets failures."""
        self.failed_starts = 0
        self.blamed.clear()
        self.last_failure = ""
        self.failure_is_permanent = False
        self.next_start_s = 0.0

    def pardon(self, name: str) -> None:
        """Takes back a failed start that was not the worker's fault; the next may be at once."""
        if name in self.blamed:
            self.blamed.remove(name)
            self.failed_starts -= 1
            self.next_start_s = 0.0
            if not self.failed_starts:
                self.note_success()

    def forgive(self, now_s: float, options: ControllerOptions) -> None:
        """Forgets failures once a worker that came after the last of them has lived on."""
        if self.failed_starts and any(
            worker.since_s >= self.last_failure_s and now_s - worker.since_s >= options.early_life_s
            for worker in self.in_state(WorkerState.READY)
        ):
            self.note_success()

    def gives_up(self, options: ControllerOptions) -> bool:
        """True while starts are paused because they keep failing."""
        return self.failure_is_permanent or self.failed_starts >= options.max_failed_starts


@dataclass(frozen=True)
class Start:
    """Start one more worker."""


@dataclass(frozen=True)
class Drain:
    """Give this worker no new work, and let it finish what it has."""

    name: str


@dataclass(frozen=True)
class Kill:
    """End this worker now."""

    name: str
    reason: str
    # Its start failed (it was not merely superfluous).
    failed: bool


Action = Start | Drain | Kill


def decide(
    pool: Pool, now_s: float, options: ControllerOptions, num_arriving: int = 0
) -> list[Action]:
    """What brings `pool` nearer to its target. Changes nothing itself.

    `num_arriving`: workers that drain elsewhere to come here. None is started in their place.

    One that leaves counts as gone: another is started, and the controller drains it then.

    Late starts and late drains are killed. Missing workers are started, so many at a time, unless
    starts are held back. Surplus is taken from those that start (newest first: they hold no
    stream), then from the ready ones (newest first), which drain.
    """
    actions: list[Action] = []
    target = pool.target - pool.num_lost
    starting = pool.in_state(WorkerState.STARTING)
    late = [w for w in starting if now_s - w.since_s > options.start_timeout_s]
    actions += [
        Kill(w.name, f"not ready {options.start_timeout_s:g} s after its start", failed=True)
        for w in late
    ]
    drain_bound_s = options.drain_timeout_s + options.drain_slack_s
    actions += [
        Kill(w.name, f"not drained within {drain_bound_s:g} s", failed=False)
        for w in pool.in_state(WorkerState.DRAINING)
        if now_s - w.since_s > drain_bound_s
    ]
    on_time = [w for w in starting if w not in late]
    ready = [w for w in pool.in_state(WorkerState.READY) if not w.leaves]
    surplus = len(on_time) + len(ready) - target
    if surplus > 0:
        superfluous = on_time[::-1][:surplus]
        actions += [Kill(w.name, "the pool was scaled in", failed=False) for w in superfluous]
        actions += [Drain(w.name) for w in ready[::-1][: surplus - len(superfluous)]]
    elif (missing := -surplus - num_arriving) > 0 and not late and now_s >= pool.next_start_s:
        # After failures one at a time: a broken start must not be tried a thousand-fold.
        may_start = 1 if pool.failed_starts else options.max_starting - len(starting)
        actions += [Start()] * min(missing, may_start)
    return actions


def describe(
    pool: Pool,
    now_s: float,
    options: ControllerOptions,
    waiting: Iterable[str] = (),
    num_arriving: int = 0,
) -> str:
    """Why current differs from target, in one sentence; empty when it does not."""
    ready = len(pool.in_state(WorkerState.READY))
    starting = len(pool.in_state(WorkerState.STARTING))
    draining = len(pool.in_state(WorkerState.DRAINING))
    parts = []
    if ready != pool.target:
        parts.append(f"{ready} of {pool.target} ready")
    if starting:
        parts.append(f"{starting} starting")
    if draining:
        parts.append(f"{draining} draining")
    if any(worker.leaves for worker in pool.in_state(WorkerState.READY)):
        parts.append("1 is drained once another is ready")
    if num_arriving:
        parts.append(f"{num_arriving} coming from another pool")
    parts += sorted(set(waiting))
    if pool.num_lost:
        parts.append(f"{pool.num_lost} lost and not replaced; last: {pool.last_failure}")
        return "; ".join(parts)
    if ready < pool.target and pool.last_failure:
        wait_s = max(0.0, pool.next_start_s - now_s)
        again = f"next try in {wait_s:.0f} s" if not starting else "trying again"
        count = f"{pool.failed_starts} in a row" if pool.failed_starts > 1 else "last"
        parts.append(f"failed starts: {count}, {again}: {pool.last_failure}")
    return "; ".join(parts)
