"""Admission: the router's bounded queue, and who may start on which workers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from legato.cluster.admit_gate import AdmitGate, refused
from legato.cluster.admit_policy import (
    Refusal,
    Work,
    admit,
    check_bounds,
    give_up,
    pick_to_displace,
    too_short,
)
from legato.cluster.deadline import NO_DEADLINE
from legato.cluster.dispatch import Dispatch
from legato.cluster.dispatch_rules import can_ever_hold, hopeless
from legato.cluster.errors import unavailable
from legato.cluster.policies import Demand, PrefillCosts, may_pass
from legato.cluster.queue_entry import Entry
from legato.cluster.spoken_time import spoken_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.attempt_placement import Placement
    from legato.cluster.config import RouterOptions
    from legato.cluster.deadline import Deadline
    from legato.cluster.errors import RequestError
    from legato.cluster.pool_view import PoolView
    from legato.cluster.prompt_hashes import PromptHashes

# Between two looks at who of those that wait cannot meet its deadline any more.
GIVE_UP_EVERY_S = 0.1
# Before its deadline a request that waits for a worker is told that none came: three times the
# router's longest pause between two looks at the queue.
LAST_WORD_S = 0.75


class Admission:
    """Waiting is here, not in the workers: here a request can be dropped, reordered, placed anew.

    `dispatch` is synchronous and runs whenever something changed, so that no two decisions can
    see the same room. Nothing waits for ever: see `_refuse_hopeless`.

    Who has its turn decides `Dispatch`; who may wait, and for how long, `admit_policy`.
    """

    def __init__(
        self,
        options: RouterOptions,
        pool: PoolView,
        *,
        now: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        costs: Callable[[float], PrefillCosts] = lambda _: PrefillCosts(None, None, None),
    ) -> None:
        """`wall_ns`: the machine's clock; `costs`: as `PrefillCostBook.costs`."""
        self._options = options
        self._pool = pool
        self._now = now
        self._wall_ns = wall_ns
        self._arrivals = 0
        self._dispatch_due = False
        self._gate = AdmitGate(options, pool, now)
        self._dispatch = Dispatch(options, pool, self._gate, self.wake, costs)
        self._waiting = self._dispatch.waiting
        self.times = self._gate.times
        self._gave_up_at = now()
        # The least of what those ask for that cannot start; None: everybody could.
        self._least_blocked: Demand | None = None

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def entries(self) -> list[Entry]:
        """Those that wait."""
        return list(self._waiting)

    def waiting(self) -> list[tuple[Demand, bool]]:
        """Of each request that waits its demand, and whether it has yet to get a prefill worker."""
        return [(entry.demand, entry.keeps is None) for entry in self._waiting if entry.waits]

    def check_arrival(self, least: Demand, most: Demand, deadline: Deadline) -> None:
        """Refuses a request that has yet to be read where it is sure not to be let in: cheaply.

        `least` and `most` bound what it will ask for.

        Raises:
            RequestError: RESOURCE_EXHAUSTED.
        """
        blocked = self._least_blocked
        if not self._waiting or blocked is None or may_pass(blocked, most):
            return  # it might start at once
        own = self._gate.newcomer(least, deadline)
        queue = self._gate.snapshot(self._waiting)
        refusal = admit(own, queue, self._gate.limits, self._gate.pace())
        if refusal is not None:
            self._gate.note_arrival(least)
            raise refused(refusal)

    def enter(
        self,
        num_answers: int,
        deadline: Deadline = NO_DEADLINE,
        prompt: PromptHashes | None = None,
    ) -> list[Entry]:
        """A request arrives: a place for each of its answers.

        Workers compare the numbers of all routers, so that they follow the clock of the machine
        that these share: counted from 1, a router started later would always go first.
        """
        first, now = max(self._arrivals + 1, self._wall_ns() // 1000), self._now()
        self._arrivals = first + num_answers - 1
        return [Entry(first + index, now, deadline, prompt) for index in range(num_answers)]

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
            # Before the look at who is to be given up, which knows only of full queues.
            own, queue = self._gate.applicant(entry), self._gate.snapshot(self._waiting)
            refusal = too_short(own, queue.ahead_of(batch=own.batch), self._gate.pace())
            if refusal is not None:
                raise refused(refusal)
        entry.placed = asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            self.dispatch()
            if not entry.placed.done():
                entry.has_waited = True
                if first:
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
            self._least_blocked = self._dispatch.start_all(now)
        self._note_queue()

    def _note_queue(self) -> None:
        self._gate.note_queue(waits=self._dispatch.waits)

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
                if entry.keeps is None and can_ever_hold(alone, entry.demand):
                    continue
                if role == "decode" and not entry.demand.decode_tokens:
                    continue
                if role == "prefill" and entry.keeps is not None:
                    continue
                if not entry.waits:
                    continue
                if workers and not can_ever_hold(workers, entry.demand):
                    error = unavailable(hopeless(entry.demand, workers))
                elif empty_since is not None and now >= self._waits_until(entry, empty_since):
                    waited_s = now - max(empty_since, entry.waiting_since)
                    near = ", and the call's deadline is near" if entry.deadline.given else ""
                    error = unavailable(
                        f"the {role} pool has had no ready worker for {spoken_time(waited_s)}{near}"
                    )
                else:
                    continue
                self._turn_away(entry, error)

    def _waits_until(self, entry: Entry, empty_since: float) -> float:
        """How long it may wait for any worker at all. A deadline says how long its client would,
        who is told just before it and still listens.
        """
        if not entry.deadline.given:
            return max(empty_since, entry.waiting_since) + self._options.worker_wait_s
        return max(entry.waiting_since, entry.deadline.at - LAST_WORD_S)

    def _give_up_late(self, now: float) -> None:
        """Fails those that cannot meet their deadline any more; nothing was begun for them."""
        if now - self._gave_up_at < GIVE_UP_EVERY_S:
            return
        self._gave_up_at = now
        pace, ahead = self._gate.pace(), Work()
        for entry in self._dispatch.in_order(now):
            if entry.waits and not entry.has_begun:
                refusal = give_up(self._gate.applicant(entry), ahead, pace)
                if refusal is not None:
                    self._turn_away(entry, refused(refusal))
                    continue
            ahead += self._gate.work(entry.demand)

    def _check_may_wait(self, entry: Entry) -> None:
        """One that comes back is refused only where those before it fill the queue, or where it
        would be given up at the next look.
        """
        others = [
            e
            for e in self._waiting
            if e is not entry and (not entry.has_asked or e.arrival < entry.arrival)
        ]
        gate = self._gate
        own, queue, limits = gate.applicant(entry), gate.snapshot(others), gate.limits
        if entry.has_asked:
            ahead, pace = queue.ahead_of(batch=own.batch), gate.pace()
            refusal = check_bounds(own, ahead, limits, pace) or give_up(own, ahead, pace)
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
