"""Admission: the router's bounded queue, and who may start on which workers."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from legato.cluster.admit_gate import AdmitGate, refused
from legato.cluster.admit_policy import (
    Refusal,
    Work,
    admit,
    check_bounds,
    give_up,
    pick_to_displace,
)
from legato.cluster.attempt_placement import Placement
from legato.cluster.dispatch_rules import close_kept, hopeless, over_open_path, smaller
from legato.cluster.errors import unavailable
from legato.cluster.policies import (
    Demand,
    Knowledge,
    WorkerSnapshot,
    counts_as_batch,
    may_pass,
    pick_decode,
    pick_prefill,
    pick_to_drain,
    queue_rank,
)
from legato.cluster.queue_entry import Entry
from legato.cluster.worker_view import DecodeShare, PrefillShare, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.config import RouterOptions
    from legato.cluster.control_plane import Role
    from legato.cluster.errors import RequestError
    from legato.cluster.pool_view import PoolView
    from legato.cluster.prompt_hashes import PromptHashes

# Between two looks at who of those that wait cannot meet its deadline any more.
GIVE_UP_EVERY_S = 0.1
NOTHING = Demand(prefill_tokens=0, decode_tokens=0)


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
    ) -> None:
        self._options = options
        self._pool = pool
        self._now = now
        self._waiting: list[Entry] = []
        self._asking: list[Entry] = []  # placed, and without the ticket that they need
        self._arrivals = 0
        self._dispatch_due = False
        self._gate = AdmitGate(options, pool, now)
        self.times = self._gate.times
        self._gave_up_at = now()
        # The least of what those ask for that cannot start; None: everybody could.
        self._least_blocked: Demand | None = None

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def check_arrival(self, least: Demand, most: Demand, left_s: float, deadline: str) -> None:
        """Refuses a request that has yet to be read where it is sure not to be let in: cheaply.

        `least` and `most` bound what it will ask for; `deadline` names its deadline in words.

        Raises:
            RequestError: RESOURCE_EXHAUSTED.
        """
        blocked = self._least_blocked
        if not self._waiting or blocked is None or may_pass(blocked, most):
            return  # it might start at once
        own = self._gate.newcomer(least, left_s, deadline)
        queue = self._gate.snapshot(self._waiting)
        refusal = admit(own, queue, self._gate.limits, self._gate.pace())
        if refusal is not None:
            self._gate.note_arrival(least)
            raise refused(refusal)

    def enter(
        self,
        num_answers: int,
        deadline_at: float = math.inf,
        deadline: str = "",
        prompt: PromptHashes | None = None,
    ) -> list[Entry]:
        """A request arrives: a place for each of its answers.

        `deadline_at` is on the queue's clock; `deadline` names it in words.
        """
        first, now = self._arrivals + 1, self._now()
        self._arrivals += num_answers
        return [Entry(first + i, now, deadline_at, deadline, prompt) for i in range(num_answers)]

    async def place(
        self, entry: Entry, demand: Demand, *, first: bool, keep: Placement | None = None
    ) -> Placement:
        """Waits until workers have room for `demand`; the caller releases the placement.

        `first` is false where work on the request has begun: then the queue's bounds do not apply.
        `keep`: an attempt under way whose decode worker was given up; its prefill worker, and its
        share of it, are the new placement's too.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, it may not wait, or not any longer (see
                `admit_policy`); UNAVAILABLE, no worker can take it.
        """
        entry.demand, entry.waiting_since, entry.keeps = demand, self._now(), keep
        entry.has_begun = not first
        if first and not entry.has_asked:
            self._gate.note_arrival(demand)
        entry.placed = asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            self.dispatch()
            if first and not entry.placed.done():
                self._check_may_wait(entry)
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
                self._note_queue()

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
        if self._waiting:
            now = self._now()
            self._refuse_hopeless(now)
            self._give_up_late(now)
            self._least_blocked = self._start_all(now)
        self._note_queue()

    def _note_queue(self) -> None:
        self._gate.note_queue(waits=bool(self._waiting))

    def _start_all(self, now: float) -> Demand | None:
        """The least of what those ask for that have to wait."""
        prefills = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("prefill")}
        decodes = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("decode")}
        closed = self._pool.paths.closed()
        everyone = tuple(prefills.values()), tuple(decodes.values())
        any_keeps = any(entry.keeps is not None for entry in self._waiting)
        smallest_blocked: Demand | None = None  # and not overdue
        least: Demand | None = None
        for entry in self._in_order(now):
            if not any_keeps and not any(w.free_blocks for w in prefills.values()):
                return NOTHING  # nobody can start
            demand = entry.demand
            overdue = now - entry.arrived_at >= self._options.max_passed_over_s
            if not entry.waits:
                if overdue and entry.asking is not None:
                    close_kept(entry, decodes)
                continue
            keeps = entry.keeps is not None
            needs = replace(demand, prefill_tokens=0) if keeps else demand
            passes = smallest_blocked is None or may_pass(smallest_blocked, needs)
            if not passes and not overdue:
                least = smaller(least, demand)
                continue
            prefill = None if keeps else pick_prefill(demand, prefills.values())
            decode = pick_decode(demand, decodes.values()) if demand.decode_tokens else None
            has_prefill = prefill is not None or keeps
            fits = has_prefill and (decode is not None or not demand.decode_tokens)
            if fits and passes:
                known = self._learnt_for(entry)
                if decode is not None and closed:
                    pair = over_open_path(
                        entry, prefills.values(), decodes.values(), everyone, closed, known
                    )
                    if pair is None:
                        continue  # not for want of room: it holds up nobody
                    prefill, decode = pair
                else:
                    if decode is not None:
                        decode = pick_decode(demand, decodes.values(), known)
                    if prefill is not None:
                        to = decode.worker_id if decode is not None else None
                        prefill = pick_prefill(demand, prefills.values(), known, to)
                self._start(entry, prefill, decode, known)
                for snapshots, picked in ((prefills, prefill), (decodes, decode)):
                    view = self._pool.view(picked.worker_id) if picked is not None else None
                    if view is not None:
                        snapshots[view.worker_id] = self._snapshot(view)
                if overdue and decode is not None:
                    close_kept(entry, decodes)
                continue
            least = smaller(least, demand)
            if overdue:
                # Also where it has room and only may not pass a younger, interactive one.
                if not has_prefill or not demand.decode_tokens:
                    self._keep_free(entry, "prefill", prefills)
                if demand.decode_tokens and (decode is None or fits):
                    self._keep_free(entry, "decode", decodes)
            else:
                smallest_blocked = smaller(smallest_blocked, demand)
        return least

    def _learnt_for(self, entry: Entry) -> Knowledge:
        """Only for one that starts: it costs as much as the prompt has blocks."""
        views = (*self._pool.placeable("prefill"), *self._pool.placeable("decode"))
        expected = self._gate.expected_output(entry.demand)
        return self._pool.learnt.about(entry.prompt, views, expected)

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
        known: Knowledge,
    ) -> None:
        """`prefill` is None where the entry keeps one."""
        decode_view = self._pool.view(decode.worker_id) if decode is not None else None
        if entry.keeps is not None:
            prefill_view, prefill_share = entry.keeps.prefill, entry.keeps.prefill_share
        else:
            view = self._pool.view(prefill.worker_id) if prefill is not None else None
            assert view is not None, "snapshots are taken from the pool within one dispatch"
            prefill_view, prefill_share = (
                view,
                PrefillShare(view, entry.demand, known.uncached(entry.demand, view.worker_id)),
            )
        assert entry.placed is not None, "only waiting entries are started"
        self._waiting.remove(entry)
        if decode is not None:
            entry.asking, entry.has_asked = decode.worker_id, True
            self._asking.append(entry)
        elif not entry.has_begun:
            self._gate.note_ticket(entry.demand)
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

    def _settle(self, entry: Entry, *, granted: bool) -> None:
        """The entry's ticket is granted, or it does not ask for one any more. Idempotent."""
        if entry.asking is not None:
            entry.asking = None
            self._asking.remove(entry)
            if granted and not entry.has_begun:
                self._gate.note_ticket(entry.demand)
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
        """Fails what no present worker can ever hold, and what waited too long for any worker."""
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            workers = [v.snapshot() for v in self._pool.placeable(role)]
            empty_since = self._pool.empty_since[role]
            for entry in tuple(self._waiting):
                if role == "decode" and not entry.demand.decode_tokens:
                    continue
                if role == "prefill" and entry.keeps is not None:
                    continue
                if not entry.waits:
                    continue
                if workers and not any(w.can_ever_hold(entry.demand) for w in workers):
                    error = unavailable(hopeless(entry.demand, workers))
                elif empty_since is not None and (
                    now - max(empty_since, entry.waiting_since) >= self._options.worker_wait_s
                ):
                    error = unavailable(
                        f"the {role} pool has had no ready worker for "
                        f"{self._options.worker_wait_s:g} s"
                    )
                else:
                    continue
                self._turn_away(entry, error)

    def _give_up_late(self, now: float) -> None:
        """Fails those that cannot meet their deadline any more; nothing was begun for them."""
        if now - self._gave_up_at < GIVE_UP_EVERY_S:
            return
        self._gave_up_at = now
        pace, backlog_tokens, ahead = self._gate.pace(), self._gate.backlog_tokens(), Work()
        for entry in self._in_order(now):
            if entry.waits and not entry.has_begun:
                applicant = self._gate.applicant(entry)
                refusal = give_up(applicant, ahead, backlog_tokens, pace)
                if refusal is not None:
                    self._turn_away(entry, refused(refusal))
                    continue
            ahead += self._gate.work(entry.demand)

    def _check_may_wait(self, entry: Entry) -> None:
        """One that comes back is refused only where those before it fill the queue."""
        others = [
            e
            for e in self._waiting
            if e is not entry and (not entry.has_asked or e.arrival < entry.arrival)
        ]
        gate = self._gate
        own, queue, limits = gate.applicant(entry), gate.snapshot(others), gate.limits
        if entry.has_asked:
            refusal = check_bounds(own, queue.ahead_of(batch=own.batch), limits, gate.pace())
        else:
            refusal = admit(own, queue, limits, gate.pace())
        if refusal is not None:
            raise refused(refusal)
        if own.batch or entry.has_asked:
            return
        batch = [e for e in others if e.demand.batch and e.waits and not e.has_begun]
        batch.sort(key=lambda e: e.arrival)
        count = pick_to_displace(own, queue, [gate.work(e.demand) for e in batch], limits)
        for displaced in batch[len(batch) - count :]:
            reason = "the queue is full: a batch request gave way to an interactive one"
            self._turn_away(displaced, refused(Refusal(reason, 1.0)))

    def _turn_away(self, entry: Entry, error: RequestError) -> None:
        assert entry.waits, "only waiting entries are turned away"
        self._waiting.remove(entry)
        assert entry.placed is not None, "it waits"
        entry.placed.set_exception(error)

    def refusal(self, limit: str) -> RequestError:
        """RESOURCE_EXHAUSTED with a hint, for a bound that is not the queue's own."""
        return refused(Refusal(f"the queue is full: {limit}", 1.0))
