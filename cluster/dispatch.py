"""Dispatch: which of those that wait may start now, in whose turn and on which workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from legato.cluster.attempt_placement import Placement
from legato.cluster.colocation import one_answer, pick_colocated, prefers_colocated
from legato.cluster.dispatch_rules import close_kept, over_open_path, smaller
from legato.cluster.policies import (
    NOTHING_KNOWN,
    Demand,
    Knowledge,
    WorkerSnapshot,
    counts_as_batch,
    may_pass,
    pick_decode,
    pick_prefill,
    pick_to_drain,
    queue_rank,
    takes_prompt,
)
from legato.cluster.worker_view import DecodeShare, PrefillShare, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from legato.cluster.admit_gate import AdmitGate
    from legato.cluster.colocation import Apart
    from legato.cluster.config import RouterOptions
    from legato.cluster.control_plane import Role
    from legato.cluster.policies import PrefillCosts
    from legato.cluster.pool_view import PoolView
    from legato.cluster.queue_entry import Entry

NOTHING = Demand(prefill_tokens=0, decode_tokens=0)


class Dispatch:
    """Of one queue, `waiting`, and of those that were placed and ask for their ticket.

    A small request passes a blocked big one until that one is overdue. From then on one worker is
    closed to all behind it, also while it asks there for a ticket, which may still be refused:
    the worker alone knows what its answers are expected to grow to.
    """

    def __init__(
        self,
        options: RouterOptions,
        pool: PoolView,
        gate: AdmitGate,
        wake: Callable[[], None],
        costs: Callable[[float], PrefillCosts],
    ) -> None:
        """`wake`: to be called where something has changed; `costs`: as `PrefillCostBook.costs`."""
        self.waiting: list[Entry] = []
        self._asking: list[Entry] = []  # placed, and without the ticket that they need
        self._options = options
        self._pool = pool
        self._gate = gate
        self._wake = wake
        self._costs = costs

    @property
    def waits(self) -> bool:
        """Whether somebody does; also one that has left the queue for a ticket it may not get."""
        return bool(self.waiting) or any(entry.has_waited for entry in self._asking)

    def start_all(self, now: float) -> Demand | None:
        """Starts who may; returns the least of what those ask for that have to wait."""
        prefills = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("prefill")}
        decodes = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("decode")}
        alone = {v.worker_id: self._snapshot(v) for v in self._pool.placeable("colocated")}
        closed = self._pool.paths.closed()
        everyone = tuple(prefills.values()), tuple(decodes.values())
        any_keeps = any(entry.keeps is not None for entry in self.waiting)
        smallest_blocked: Demand | None = None  # and not overdue
        least: Demand | None = None
        for entry in self.in_order(now):
            if not any_keeps and not any(
                w.free_blocks for w in (*prefills.values(), *alone.values())
            ):
                return NOTHING  # nobody can start
            demand = entry.demand
            overdue = entry.is_overdue(now, self._options.max_passed_over_s)
            if not entry.waits:
                if overdue and entry.asking is not None:
                    close_kept(entry, decodes, alone)
                continue
            keeps = entry.keeps is not None
            needs = replace(demand, prefill_tokens=0) if keeps else demand
            passes = smallest_blocked is None or may_pass(smallest_blocked, needs)
            if not passes and not overdue:
                least = smaller(least, demand)
                continue
            decodes_too = demand.decode_tokens > 0
            has_prefill = keeps or any(takes_prompt(demand, w) for w in prefills.values())
            has_decode = not decodes_too or any(w.can_hold_now(demand) for w in decodes.values())
            fits = has_prefill and has_decode
            prefill: WorkerSnapshot | None = None
            decode: WorkerSnapshot | None = None
            if passes and not keeps and alone:
                apart: Apart = None
                if fits:
                    prefill = pick_prefill(demand, prefills.values())
                    decode = pick_decode(demand, decodes.values()) if decodes_too else None
                    apart = prefill, decode
                if apart is not None and decode is not None and closed:
                    apart = over_open_path(
                        entry, prefills.values(), decodes.values(), everyone, closed, NOTHING_KNOWN
                    )
                colocated = self._choose_colocated(demand, alone.values(), apart)
                if colocated is not None:
                    self._start(entry, colocated, colocated, self._learnt_for(entry))
                    self._refresh(alone, colocated)
                    if overdue:
                        close_kept(entry, decodes, alone)
                    continue
            if fits and passes:
                known = self._learnt_for(entry)
                if decodes_too and closed:
                    pair = over_open_path(
                        entry, prefills.values(), decodes.values(), everyone, closed, known
                    )
                    if pair is None:
                        continue  # not for want of room: it holds up nobody
                    prefill, decode = pair
                else:
                    if decodes_too:
                        decode = pick_decode(demand, decodes.values(), known)
                    if not keeps:
                        to = decode.worker_id if decode is not None else None
                        prefill = pick_prefill(demand, prefills.values(), known, to)
                self._start(entry, prefill, decode, known)
                for snapshots, picked in ((prefills, prefill), (decodes, decode)):
                    if picked is not None:
                        self._refresh(snapshots, picked)
                if overdue and decode is not None:
                    close_kept(entry, decodes, alone)
                continue
            least = smaller(least, demand)
            if overdue:
                # Also where it has room and only may not pass a younger, interactive one.
                if not has_prefill or not decodes_too:
                    self._keep_free(entry, "prefill", prefills)
                if decodes_too and (not has_decode or fits):
                    self._keep_free(entry, "decode", decodes)
                if not keeps:
                    self._keep_free(entry, "colocated", alone)
            else:
                smallest_blocked = smaller(smallest_blocked, demand)
        return least

    def _choose_colocated(
        self, demand: Demand, workers: Iterable[WorkerSnapshot], pair: Apart
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

    def _learnt_for(self, entry: Entry) -> Knowledge:
        """Only for one that starts: it costs as much as the prompt has blocks."""
        views = (
            *self._pool.placeable("prefill"),
            *self._pool.placeable("decode"),
            *self._pool.placeable("colocated"),
        )
        expected = self._gate.expected_output(entry.demand)
        return self._pool.learnt.about(entry.prompt, views, expected)

    def _snapshot(self, view: WorkerView) -> WorkerSnapshot:
        snapshot = view.snapshot()
        asking = [e.demand for e in self._asking if e.asking == view.worker_id]
        return replace(snapshot, asking=tuple(asking)) if asking else snapshot

    def in_order(self, now: float) -> list[Entry]:
        """Those that wait, and those that may be sent back to wait."""
        for entry in self.waiting:
            waited_s = now - entry.arrived_at
            if entry.demand.batch and not counts_as_batch(batch=True, waited_s=waited_s):
                entry.demand = replace(entry.demand, batch=False)
        return sorted(
            (*self.waiting, *self._asking),
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
        """`prefill` is None where the entry keeps one, and is `decode` where that is colocated."""
        if decode is not None and decode.role == "colocated":
            entry.demand = one_answer(entry.demand)
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
        self.waiting.remove(entry)
        if decode is not None:
            entry.asking, entry.has_asked = decode.worker_id, True
            self._asking.append(entry)
        elif not entry.has_begun:
            self._gate.note_start(entry.demand)
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
                wake=self._wake,
            )
        )

    def _settle(self, entry: Entry, *, granted: bool) -> None:
        """The entry's ticket is granted, or it does not ask for one any more. Idempotent."""
        if entry.asking is not None:
            if granted and not entry.has_begun:
                self._gate.note_start(entry.demand)
            entry.asking = None
            self._asking.remove(entry)
            self._gate.note_queue(waits=self.waits)
            self._wake()

    def _keep_free(self, entry: Entry, role: Role, open_workers: dict[str, WorkerSnapshot]) -> None:
        """Closes one worker to everybody behind an overdue request; always the same one."""
        kept = open_workers.get(entry.kept_free.get(role, ""))
        if kept is None:
            kept = pick_to_drain(entry.demand, open_workers.values())
        if kept is not None:
            entry.kept_free[role] = kept.worker_id
            del open_workers[kept.worker_id]
