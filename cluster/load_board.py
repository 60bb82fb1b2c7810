"""LoadBoard: the routers' reports of load, and the pressure on each pool that they add up to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from legato.cluster.load_window import WINDOW_S
from legato.cluster.pool_pressure import DecodePressure, PoolSize, PrefillPressure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from legato.cluster.load_window import WindowFigures
    from legato.cluster.router_load import RouterLoad, WorkerFigures

STALE_S = 5.0  # a router that was not heard for so long counts no more
# Steps that took less in all say little of a worker's speed: the last value that is known stands.
MIN_MEASURED_S = 0.02


class LoadBoard:
    """Routers count apart what waits with them; what a worker says of itself counts once, as it was
    told last. The clock is handed in; empty again after a restart, it fills within two reports.
    """

    def __init__(self) -> None:
        self._loads: dict[str, tuple[float, RouterLoad]] = {}
        self._meters: dict[str, _Meter] = {}
        self._tokens_per_s: float | None = None

    def note(self, load: RouterLoad, now_s: float) -> None:
        """A report came."""
        self._loads[load.router_id] = (now_s, load)
        for worker in load.workers:
            if worker.role == "prefill":
                meter = self._meters.setdefault(worker.worker_id, _Meter())
                meter.note(now_s, worker.prompt_tokens, worker.model_s)

    def hears(self, now_s: float) -> bool:
        """False where no router has told anything of late: then nothing is known of the load."""
        return bool(self._fresh(now_s))

    def prefill(self, size: PoolSize, worker_ids: Collection[str], now_s: float) -> PrefillPressure:
        """`worker_ids`: those that are ready."""
        loads = self._fresh(now_s)
        waiting = dict.fromkeys(worker_ids, 0)
        for worker in (w for load in loads for w in load.workers if w.worker_id in waiting):
            waiting[worker.worker_id] += worker.waiting_tokens
        self._meters = {name: self._meters[name] for name in worker_ids if name in self._meters}
        measured = [meter.over_window(now_s) for meter in self._meters.values()]
        model_s = sum(seconds for _, seconds, _ in measured)
        if model_s >= MIN_MEASURED_S:
            self._tokens_per_s = sum(tokens for tokens, _, _ in measured) / model_s
        return PrefillPressure(
            size=size,
            waiting_requests=sum(load.queued_for_prefill for load in loads),
            waiting_tokens=sum(load.queued_prefill_tokens for load in loads)
            + sum(waiting.values()),
            worker_tokens_per_s=self._tokens_per_s or None,
            busy_workers=sum(share for _, _, share in measured),
            ttft_p90_s=_mean(loads, lambda w: (w.ttft_p90_s, w.num_first_tokens)),
            idlest=min(waiting, key=lambda name: (waiting[name], name), default=""),
        )

    def decode(self, size: PoolSize, worker_ids: Collection[str], now_s: float) -> DecodePressure:
        """`worker_ids`: those that are ready."""
        loads = self._fresh(now_s)
        latest: dict[str, WorkerFigures] = {}
        for worker in (w for load in loads for w in load.workers if w.worker_id in worker_ids):
            latest[worker.worker_id] = worker
        return DecodePressure(
            size=size,
            waiting_requests=sum(load.queued_for_decode for load in loads),
            waiting_blocks=sum(load.queued_decode_blocks for load in loads),
            used_blocks=sum(worker.used_blocks for worker in latest.values()),
            total_blocks=sum(worker.total_blocks for worker in latest.values()),
            running=sum(worker.running for worker in latest.values()),
            itl_s=_mean(loads, lambda w: (w.itl_mean_s, w.num_tokens)),
            idlest=min(latest, key=lambda name: (latest[name].used_blocks, name), default=""),
        )

    def _fresh(self, now_s: float) -> list[RouterLoad]:
        """Of routers that live, oldest report first."""
        self._loads = {
            name: told for name, told in self._loads.items() if now_s - told[0] <= STALE_S
        }
        return [load for _, load in sorted(self._loads.values(), key=lambda told: told[0])]


class _Meter:
    """Two counters of a worker over the window."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, float]] = deque()

    def note(self, now_s: float, tokens: int, model_s: float) -> None:
        """A later report may be of an earlier moment, where it comes from another router."""
        if self._points and tokens < self._points[-1][1]:
            return
        self._points.append((now_s, tokens, model_s))

    def over_window(self, now_s: float) -> tuple[int, float, float]:
        """Tokens, seconds in steps, and the share of time that these are, from 0 to 1."""
        while len(self._points) > 1 and self._points[0][0] < now_s - WINDOW_S:
            self._points.popleft()
        if not self._points:
            return 0, 0.0, 0.0
        (began_s, tokens, model_s), (_, last_tokens, last_model_s) = (
            self._points[0],
            self._points[-1],
        )
        in_steps_s, span_s = last_model_s - model_s, max(1.0, now_s - began_s)
        # A step is counted when it ends: one that began before the window may take more than it.
        return last_tokens - tokens, in_steps_s, min(1.0, in_steps_s / span_s)


def _mean(
    loads: Iterable[RouterLoad], pick: Callable[[WindowFigures], tuple[float, int]]
) -> float | None:
    """Over routers, each with the weight of what it counted; None where none counted anything."""
    picked = [pick(load.window) for load in loads]
    count = sum(number for _, number in picked)
    return sum(value * number for value, number in picked) / count if count else None
