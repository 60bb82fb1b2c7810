"""Preemption: takes KV blocks from those that yield, and says where their contents go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.kv.block_pool import blocks_for
from legato.worker.priority import Priority
from legato.worker.scheduling.claim import AdmissionMode
from legato.worker.scheduling.decision import SwapOut
from legato.worker.scheduling.live import Swapped, claim_of, lease_of, needs_block, rank
from legato.worker.scheduling.victims import choose_lower, choose_victim
from legato.worker.sequence import SequenceState

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.scheduling.capacity import CapacityLedger
    from legato.worker.scheduling.decision import Decision
    from legato.worker.scheduling.live import LiveSequences
    from legato.worker.sequence import Sequence


class Preemption:
    """A part of CapacityScheduler, on the same sequences."""

    def __init__(
        self,
        pool: BlockPool,
        ledger: CapacityLedger,
        host_pool: BlockPool | None,
        live: LiveSequences,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._block_size = ledger.block_size
        self._host_pool = host_pool
        self._live = live
        self.count = 0  # victims so far

    def make_room(
        self, takers: list[Sequence], plan: Decision, hand: list[int], now: float
    ) -> bool:
        """Preempts until the rest of `takers` can get a block each; whether anyone was."""
        coming = self.num_blocks_coming()
        preempted = False
        while True:
            needed = sum(
                needs_block(s, self._block_size) and not claim_of(s).promised for s in takers
            )
            available = self._pool.usage().available
            if needed <= available + len(hand) + coming:
                return preempted
            victim = self._victim()
            if victim is None:
                return preempted
            self._preempt(victim, plan, hand, needed - available, now)
            preempted = True
            if victim in takers:
                takers.remove(victim)

    def make_room_above(self, plan: Decision, hand: list[int], now: float) -> None:
        """Preempts for the first that lies swapped out or waits to come in, of higher priority."""
        if self._ledger.rule.mode is AdmissionMode.RESERVE:
            return  # everybody was promised to stay
        if not (self._live.swapped or self._live.wanted):
            return
        candidates = sorted((*self._live.running, *self._live.waiting), key=rank, reverse=True)
        lowest = claim_of(candidates[0]).priority if candidates else Priority.INTERACTIVE
        first = min(self._live.swapped, key=rank, default=None)
        if first is not None and claim_of(first).priority > lowest:
            priority = claim_of(first).priority
            num_blocks = blocks_for(first.num_known_or_unread, self._block_size)
        elif self._live.wanted and self._live.wanted[0].priority > lowest:
            priority = self._live.wanted[0].priority
            first = None
            num_blocks = self._ledger.blocks_to_enter(self._live.wanted[0])
        else:
            return
        missing = num_blocks - self._pool.usage().available - self.num_blocks_coming()
        victims = choose_lower(candidates, priority, missing, self._is_protected)
        freed = sum(claim_of(victim).own_blocks for victim in victims)
        fits = (
            self._ledger.may_return(claim_of(first), num_blocks, freed)
            if first is not None
            else self._ledger.may_enter(self._live.wanted[0], freed + self.num_blocks_coming())
        )
        if victims and freed >= missing and fits:
            for victim in victims:
                self._preempt(victim, plan, hand, missing if first is not None else 0, now)

    def _victim(self) -> Sequence | None:
        return choose_victim([*self._live.running, *self._live.waiting], self._is_protected)

    def _is_protected(self, sequence: Sequence) -> bool:
        return claim_of(sequence).num_preemptions >= self._ledger.rule.max_preemptions

    def _preempt(
        self, victim: Sequence, plan: Decision, hand: list[int], wanted: int, now: float
    ) -> None:
        """Takes the victim's blocks, up to `wanted` in all into `hand`, its last ones first."""
        claim, lease = claim_of(victim), lease_of(victim)
        blocks = list(lease.blocks)
        lease.blocks.clear()
        for place in reversed(range(len(blocks))):
            if len(hand) >= wanted:
                break
            if self._pool.make_writable(blocks[place]):
                hand.append(blocks[place])
        kept = set(hand)
        plan.free_after.append([block for block in blocks if block not in kept])
        self.count += 1
        claim.num_preemptions += 1
        claim.own_blocks = claim.num_shared_blocks = 0
        victim.num_registered = 0  # whatever blocks it gets next, they have no names
        (self._live.waiting if victim.state is SequenceState.WAITING else self._live.running).pop(
            victim
        )
        num_full = blocks_for(victim.num_computed, self._block_size)
        slots = self._host_pool.allocate(num_full) if self._host_pool is not None else None
        if slots is None:
            victim.move_to(SequenceState.DONE)
            self._live.prompts.pop(victim, None)
            self._ledger.withdraw(claim)
            plan.returned.append(victim)
            return
        victim.move_to(SequenceState.SWAPPED)
        victim.num_swaps += 1
        claim.swapped = True
        self._live.swapped[victim] = Swapped(slots, now)
        plan.swap_outs.append(SwapOut(victim, blocks[:num_full], slots))

    def num_blocks_coming(self) -> int:
        """Blocks that the steps under way will give back: worth a step's wait."""
        coming = sum(claim_of(s).own_blocks for s in self._live.running if s.ends_unread)
        for decision in self._live.unsettled:
            coming += sum(len(blocks) for blocks in decision.free_after)
            # These ended, but the device may still write to their blocks.
            ended = (p.sequence for p in decision.parts if p.sequence.state is SequenceState.DONE)
            coming += sum(claim_of(s).own_blocks for s in ended)
        return coming
