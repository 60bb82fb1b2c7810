"""Admission: the router's bounded queue, and who may start on which workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import grpc

from legato.cluster.colocation import one_answer, pick_colocated, prefers_colocated
from legato.cluster.errors import RequestError, unavailable
from legato.cluster.path_policies import has_open_path, pick_pair, pick_reachable
from legato.cluster.policies import (
    Demand,
    PrefillCosts,
    WorkerSnapshot,
    counts_as_batch,
    may_pass,
    pick_decode,
    pick_prefill,
    pick_to_drain,
    queue_rank,
)
from legato.cluster.worker_view import DecodeShare, PrefillShare, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from legato.cluster.colocation import Apart
    from legato.cluster.config import RouterOptions
    from legato.cluster.control_plane import Role
    from legato.cluster.path_policies import Closed
    from legato.cluster.pool_view import PoolView

_NO_PATHS: Closed = frozenset()
# Before its deadline a request that waits for a worker is told that none came: three times the
# router's longest pause between two looks at the queue.
LAST_WORD_S = 0.75


@dataclass(frozen=True)
class Placement:
    """The workers of one attempt, with the attempt's share of each; a colocated one is both."""

    demand: Demand  # as it stood then: a batch request that had waited long is none any more
    prefill: WorkerView
    prefill_share: PrefillShare
    decode: WorkerView | None
    decode_share: DecodeShare | None
    settle: Callable[[], None]  # the decode worker is asked no more, see `granted`
    wake: Callable[[], None]

    @property
    def is_colocated(self) -> bool:
        """Whether one worker computes the prompt and decodes."""
        return self.prefill is self.decode

    def granted(self) -> None:
        """The decode worker gave a ticket."""
        if self.decode_share is not None:
            self.decode_share.granted()
        self.settle()

    def computed(self) -> None:
        """Prefill gave the first token: the next prompt may go there."""
        self.prefill_share.computed()
        self.wake()

    def handed_over(self) -> None:
        """The KV is with the decode worker: prefill's blocks are free."""
        self.prefill_share.release()
        self.wake()

    def give_up_decode(self) -> None:
        """The decode worker is lost to the attempt, or took it not; prefill goes on. Idempotent."""
        self.settle()
        if self.decode_share is not None:
            self.decode_share.release()
        self.wake()

    def release(self) -> None:
        """Gives back what is still held of both workers. Idempotent."""
        self.prefill_share.release()
        self.give_up_decode()


class Entry:
    """One answer's place in the queue; it keeps it over all its attempts.

    Answers that are served together wait in the first one's place.
    """

    def __init__(self, arrival: int, now: float, deadline: float | None) -> None:
        self.arrival = arrival  # by requests, then by answers
        self.arrived_at = now
        self.deadline = deadline  # that the client has set, on the same clock
        self.waiting_since = now  # of the present wait
        self.demand = Demand(prefill_tokens=0, decode_tokens=0)
        self.placed: asyncio.Future[Placement] | None = None
        self.keeps: Placement | None = None  # only another decode worker is wanted
        self.asking: str | None = None  # the decode worker that has yet to grant its ticket
        self.has_asked = False  # it comes back to the queue, and stands before others there
        self.kept_free: dict[Role, str] = {}  # workers that drain for it, once it is overdue


class Admission:
    """Waiting is here, not in the workers: here a request can be dropped, reordered, placed anew.

    `dispatch` is synchronous and runs whenever something changed, so that no two decisions can
    see the same room. Nothing waits for ever: see `_refuse_hopeless`.

    A small request passes a blocked big one until that one is overdue. From then on one worker is
    closed to all behind it, also while it asks there for a ticket, which may still be refused:
    the worker alone knows what its answers are expected to grow to.
    """

    def __init__(
        self,
        options: RouterOptions,
        pool: PoolView,
        *,
        now: Callable[[], float] = time.monotonic,
        costs: Callable[[float], PrefillCosts] = lambda _: PrefillCosts(None, None, None),
    ) -> None:
        """`costs`: as `PrefillCostBook.costs`."""
        self._costs = costs
        self._options = options
        self._pool = pool
        self._now = now
        self._waiting: list[Entry] = []
        self._asking: list[Entry] = []  # placed, and without the ticket that they need
        self._arrivals = 0
        self._dispatch_due = False
        self._last_start_at = now()
        self._start_interval_s = 0.05  # between two starts, smoothed; for the retry hint

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def waiting(self) -> list[tuple[Demand, bool]]:
        """Of each request that waits its demand, and whether it has yet to get a prefill worker."""
        return [
            (entry.demand, entry.keeps is None)
            for entry in self._waiting
            if entry.placed is not None and not entry.placed.done()
        ]

    def enter(self, num_answers: int, deadline: float | None = None) -> list[Entry]:
        """A request arrives: a place for each of its answers. `deadline`: its client's, if any.

        Workers compare the numbers of all routers, so that they follow the clock of the machine
        that these share: counted from 1, a router started later would always go first.
        """
        first, now = max(self._arrivals + 1, time.time_ns() // 1000), self._now()
        self._arrivals = first + num_answers - 1
        return [Entry(first + index, now, deadline) for index in range(num_answers)]

    async def place(
        self, entry: Entry, demand: Demand, *, first: bool, keep: Placement | None = None
    ) -> Placement:
        """Waits until workers have room for `demand`; the caller releases the placement.

        `first` is false where work on the request has begun: then the queue's bounds do not apply.
        `keep`: an attempt under way whose decode worker was given up; its prefill worker, and its
        share of it, are the new placement's too.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, the queue is full; UNAVAILABLE, no worker can take it.
        """
        entry.demand, entry.waiting_since, entry.keeps = demand, self._now(), keep
        entry.placed = asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            self.dispatch()
            if first and not entry.placed.done():
                self._check_bounds(entry)
            return await entry.placed
        except BaseException:
            # Cancelled in the moment of being placed: the room must not be lost.
            if entry.placed.done() and not entry.placed.cancelled():
                if entry.placed.exception() is None:
                    entry.placed.result().release()
                self.wake()
            raise
        finally:
            entry.keeps = None
            if entry in self._waiting:
                self._waiting.remove(entry)

    def wake(self) -> None:
        """Something changed: dispatch soon, once for all that changes in the same moment."""
        if self._waiting and not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)

    def _dispatch_now(self) -> None:
        self._dispatch_due = False
        self.dispatch()

    def dispatch(self) -> None:
        """Starts every waiting request that may start now."""
        if not self._waiting:
            return
        now = self._now()
        self._refuse_hopeless(now)
        prefills = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("prefill")}
        decodes = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("decode")}
        alone = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("colocated")}
        closed = self._pool.paths.closed()
        everyone = tuple(prefills.values()), tuple(decodes.values())
        any_keeps = any(entry.keeps is not None for entry in self._waiting)
        smallest_blocked: Demand | None = None
        for entry in self._in_order(now):
            if not any_keeps and not any(
                w.free_blocks for w in (*prefills.values(), *alone.values())
            ):
                break  # nobody can start
            demand = entry.demand
            overdue = now - entry.arrived_at >= self._options.max_passed_over_s
            if entry.placed is None or entry.placed.done():
                if overdue and entry.asking is not None:
                    _close_kept(entry, decodes, alone)
                continue
            keeps = entry.keeps is not None
            needs = replace(demand, prefill_tokens=0) if keeps else demand
            passes = smallest_blocked is None or may_pass(smallest_blocked, needs)
            if not passes and not overdue:
                continue
            prefill = None if keeps else pick_prefill(demand, prefills.values())
            decode = pick_decode(demand, decodes.values()) if demand.decode_tokens else None
            has_prefill = prefill is not None or keeps
            fits = has_prefill and (decode is not None or not demand.decode_tokens)
            if passes and not keeps and alone:
                apart: Apart = (prefill, decode) if fits else None
                if apart is not None and decode is not None and closed:
                    apart = _over_open_path(
                        entry, prefills.values(), decodes.values(), everyone, closed
                    )
                colocated = self._choose_colocated(demand, alone.values(), apart)
                if colocated is not None:
                    self._start(entry, colocated, colocated, now)
                    self._refresh(alone, colocated)
                    if overdue:
                        _close_kept(entry, decodes, alone)
                    continue
            if fits and passes and decode is not None and closed:
                chosen = _over_open_path(
                    entry, prefills.values(), decodes.values(), everyone, closed
                )
                if chosen is None:
                    continue  # not for want of room: it holds up nobody
                prefill, decode = chosen
            if fits and passes:
                self._start(entry, prefill, decode, now)
                for snapshots, picked in ((prefills, prefill), (decodes, decode)):
                    if picked is not None:
                        self._refresh(snapshots, picked)
                if overdue and decode is not None:
                    _close_kept(entry, decodes, alone)
            elif overdue:
                # Also where it has room and only may not pass a younger, interactive one.
                if not has_prefill or not demand.decode_tokens:
                    self._keep_free(entry, "prefill", prefills)
                if demand.decode_tokens and (decode is None or fits):
                    self._keep_free(entry, "decode", decodes)
                if not keeps:
                    self._keep_free(entry, "colocated", alone)
            else:
                smallest_blocked = _smaller(smallest_blocked, demand)

    def _choose_colocated(
        self,
        demand: Demand,
        workers: Iterable[WorkerSnapshot],
        pair: Apart,
    ) -> WorkerSnapshot | None:
        """The colocated worker that the request goes to; None: it goes to the pair, or waits."""
        demand = one_answer(demand)
        colocated = pick_colocated(demand, workers)
        if colocated is None:
            return None
        costs = self._costs(colocated.local_token_s)
        return colocated if prefers_colocated(demand, colocated, pair, costs) else None

    def _refresh(self, snapshots: dict[str, WorkerSnapshot], picked: WorkerSnapshot) -> None:
        """After a start."""
        view = self._pool.view(picked.worker_id)
        if view is not None:
            snapshots[view.worker_id] = self._snapshot(view)

    def _snapshot(self, view: WorkerView) -> WorkerSnapshot:
        asking = tuple(e.demand for e in self._asking if e.asking == view.worker_id)
        return replace(view.snapshot(), asking=asking)

    def _in_order(self, now: float) -> list[Entry]:
        """Those that wait, and those that may be sent back to wait."""
        for entry in self._waiting:
            waited_s = now - entry.arrived_at
            if entry.demand.batch and not counts_as_batch(batch=True, waited_s=waited_s):
                entry.demand = replace(entry.demand, batch=False)
        return sorted(
            (*self._waiting, *self._asking),
            key=lambda e: queue_rank(
                batch=e.demand.batch, waited_s=now - e.arrived_at, arrival=e.arrival
            ),
        )

    def _start(
        self,
        entry: Entry,
        prefill: WorkerSnapshot | None,
        decode: WorkerSnapshot | None,
        now: float,
    ) -> None:
        """`prefill` is None where the entry keeps one, and is `decode` where that is colocated."""
        if decode is not None and decode.role == "colocated":
            entry.demand = one_answer(entry.demand)
        decode_view = self._pool.view(decode.worker_id) if decode is not None else None
        if entry.keeps is not None:
            prefill_view, prefill_share = entry.keeps.prefill, entry.keeps.prefill_share
        else:
            view = self._pool.view(prefill.worker_id) if prefill is not None else None
            assert view is not None, "snapshots are taken from the pool within one dispatch"
            prefill_view, prefill_share = view, PrefillShare(view, entry.demand)
        assert entry.placed is not None, "only waiting entries are started"
        self._start_interval_s += 0.1 * (now - self._last_start_at - self._start_interval_s)
        self._last_start_at = now
        self._waiting.remove(entry)
        if decode is not None:
            entry.asking, entry.has_asked = decode.worker_id, True
            self._asking.append(entry)
        entry.placed.set_result(
            Placement(
                demand=entry.demand,
                prefill=prefill_view,
                prefill_share=prefill_share,
                decode=decode_view,
                decode_share=DecodeShare(decode_view, entry.demand)
                if decode_view is not None
                else None,
                settle=partial(self._settle, entry),
                wake=self.wake,
            )
        )

    def _settle(self, entry: Entry) -> None:
        """The entry's ticket is granted, or it does not ask for one any more. Idempotent."""
        if entry.asking is not None:
            entry.asking = None
            self._asking.remove(entry)
            self.wake()

    def _keep_free(self, entry: Entry, role: Role, open_workers: dict[str, WorkerSnapshot]) -> None:
        """Closes one worker to everybody behind an overdue request; always the same one."""
        kept = open_workers.get(entry.kept_free.get(role, ""))
        if kept is None:
            kept = pick_to_drain(entry.demand, open_workers.values())
        if kept is not None:
            entry.kept_free[role] = kept.worker_id
            del open_workers[kept.worker_id]

    def _refuse_hopeless(self, now: float) -> None:
        """Fails what no present worker can ever hold, and what waited too long for any worker.

        Not what a colocated worker can hold. Where there is none, and never was a pair, those are
        the workers that are missed.
        """
        alone = [v.snapshot() for v in self._pool.placeable("colocated")]
        for role in self._pool.needed_roles():
            workers = [v.snapshot() for v in self._pool.placeable(role)]
            empty_since = self._pool.empty_since[role]
            for entry in tuple(self._waiting):
                if entry.keeps is None and _can_ever_hold(alone, entry.demand):
                    continue
                if role == "decode" and not entry.demand.decode_tokens:
                    continue
                if role == "prefill" and entry.keeps is not None:
                    continue
                if entry.placed is None or entry.placed.done():
                    continue
                if workers and not _can_ever_hold(workers, entry.demand):
                    error = unavailable(_hopeless(entry.demand, workers))
                elif empty_since is not None and now >= self._waits_until(entry, empty_since):
                    waited_s = now - max(empty_since, entry.waiting_since)
                    near = "" if entry.deadline is None else ", and the call's deadline is near"
                    error = unavailable(
                        f"the {role} pool has had no ready worker for {waited_s:.3g} s{near}"
                    )
                else:
                    continue
                self._waiting.remove(entry)
                entry.placed.set_exception(error)

    def _waits_until(self, entry: Entry, empty_since: float) -> float:
        """How long it may wait for any worker at all. A deadline says how long its client would,
        who is told just before it and still listens.
        """
        if entry.deadline is None:
            return max(empty_since, entry.waiting_since) + self._options.worker_wait_s
        return max(entry.waiting_since, entry.deadline - LAST_WORD_S)

    def _check_bounds(self, entry: Entry) -> None:
        """One that comes back is refused only where those before it fill the queue."""
        others = [
            e
            for e in self._waiting
            if e is not entry and (not entry.has_asked or e.arrival < entry.arrival)
        ]
        tokens = sum(e.demand.prefill_tokens for e in others) + entry.demand.prefill_tokens
        if len(others) >= self._options.max_queued_requests:
            limit = f"{len(others)} requests wait (limit {self._options.max_queued_requests})"
        elif others and tokens > self._options.max_queued_tokens:
            limit = f"{tokens} prompt tokens would wait (limit {self._options.max_queued_tokens})"
        else:
            return
        raise self.refusal(limit)

    def refusal(self, limit: str) -> RequestError:
        """RESOURCE_EXHAUSTED with a hint: about the time in which a tenth of the queue starts."""
        wait_s = min(30.0, max(0.1, self._start_interval_s * (len(self._waiting) // 10 + 1)))
        return RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the queue is full: {limit}; try again in {wait_s:.1f} s",
            retry_after_ms=int(wait_s * 1000),
        )


def _over_open_path(
    entry: Entry,
    prefills: Iterable[WorkerSnapshot],
    decodes: Iterable[WorkerSnapshot],
    everyone: tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]],
    closed: Closed,
) -> tuple[WorkerSnapshot | None, WorkerSnapshot] | None:
    """Workers that have room now, a prefill worker only where none is kept; None: to be waited for.

    A path that failed of late is taken where each one has, among all workers that are large enough.
    """
    demand = entry.demand
    all_prefills, all_decodes = (
        [w.worker_id for w in workers if w.can_ever_hold(demand)] for workers in everyone
    )
    if entry.keeps is None:
        is_choice = has_open_path(all_prefills, all_decodes, closed)
        return pick_pair(
            demand, tuple(prefills), tuple(decodes), closed if is_choice else _NO_PATHS
        )
    kept = entry.keeps.prefill.worker_id
    is_choice = has_open_path((kept,), all_decodes, closed)
    decode = pick_reachable(demand, kept, decodes, closed if is_choice else _NO_PATHS)
    return None if decode is None else (None, decode)


def _smaller(blocked: Demand | None, demand: Demand) -> Demand:
    """The least of both needs: who asks for less than this asks for less than each blocked one."""
    if blocked is None:
        return demand
    return Demand(
        prefill_tokens=min(blocked.prefill_tokens, demand.prefill_tokens),
        decode_tokens=min(blocked.all_decode_tokens, demand.all_decode_tokens),
    )


def _close_kept(
    entry: Entry, decodes: dict[str, WorkerSnapshot], alone: dict[str, WorkerSnapshot]
) -> None:
    """Of an overdue request that asks for a ticket: it may be refused, and must find no less room
    than there is now.
    """
    kept = entry.kept_free
    for worker_id in (entry.asking, kept.get("decode"), kept.get("colocated")):
        if worker_id is not None:
            decodes.pop(worker_id, None)
            alone.pop(worker_id, None)


def _can_ever_hold(workers: Iterable[WorkerSnapshot], demand: Demand) -> bool:
    return any(
        w.can_ever_hold(one_answer(demand) if w.role == "colocated" else demand) for w in workers
    )


def _hopeless(demand: Demand, workers: list[WorkerSnapshot]) -> str:
    largest = max(workers, key=lambda w: w.total_blocks * w.block_size)
    need = demand.decode_tokens
    if largest.role == "prefill" or not demand.decode_tokens:
        need = demand.prefill_tokens
    each = ""
    if largest.role == "decode" and demand.num_answers > 1:
        each = f" for each of its {demand.num_answers} answers"
    return (
        f"no {largest.role} worker can hold this request: it needs {need} KV tokens{each}, "
        f"the largest {largest.role} worker now holds {largest.total_blocks * largest.block_size}"
    )
