"""CapacityScheduler: which sequences decode next, and who yields when KV blocks run out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.kv.block_pool import blocks_for
from legato.worker.priority import Priority
from legato.worker.scheduling.decision import BlockCopy, Decision, SwapIn
from legato.worker.scheduling.generated import GeneratedBlocks
from legato.worker.scheduling.live import (
    LiveSequences,
    claim_of,
    lease_of,
    needs_block,
    num_to_compute,
    rank,
)
from legato.worker.scheduling.parking import Parking
from legato.worker.scheduling.preemption import Preemption
from legato.worker.scheduling.prompt_pieces import PromptPieces
from legato.worker.sequence import FinishReason, SequenceState

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.scheduling.capacity import CapacityLedger
    from legato.worker.scheduling.claim import Newcomer
    from legato.worker.scheduling.step import Step
    from legato.worker.sequence import Sequence

# A batch sequence that lies swapped out this long counts as interactive from then on, so that a
# steady stream of those cannot keep it out for ever. As in the router's queue.
BATCH_AGEING_S = 10.0


class CapacityScheduler:
    """Every sequence takes part in every step, as far as blocks and `max_batch_size` allow.

    A sequence may come with rows of its prompt still to be computed; it has all blocks for them,
    and they are computed in small pieces beside the others' tokens (`PromptPieces`).

    Blocks are taken one by one, when a row is about to need them. Where too few are left, victims
    yield until the others can go on: of those not protected the one of the lowest priority, of
    these the newest; the oldest of the highest priority never yields, so that one always gets to
    its end. A sequence is protected once it was preempted `max_preemptions` times: then it yields
    only when all others are protected too. A victim's KV goes to the host's memory; where there is
    no room for it, the victim is returned, to be computed anew elsewhere.

    Against thrashing: a decision that preempts for want of blocks brings nobody back; who comes
    back must fit beside what all are expected to grow, at a risk that halves with each of its
    preemptions; they come back oldest first and none passes another; newcomers are admitted only
    beside those that have yet to come back; and a step's wait is preferred where blocks are about
    to be given back anyway.

    `schedule`, `commit` when the step is started, `settle` when the device has finished it; the
    next may be scheduled before the last is settled. Used by the engine thread; the pool and the
    ledger are shared with the event loop, which may take blocks at any moment: then sequences
    sit out a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        ledger: CapacityLedger,
        max_batch_size: int,
        host_pool: BlockPool | None = None,
        *,
        mixes_prompts: bool = True,
        chunk_tokens: int = 0,
    ) -> None:
        """`host_pool`: slots of one block each in the host's memory; None: nobody is swapped.
        `mixes_prompts`, `chunk_tokens`: see `PromptPieces`.
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self._pool = pool
        self._ledger = ledger
        self._block_size = ledger.block_size
        self._max_batch_size = max_batch_size
        self._host_pool = host_pool
        self._live = LiveSequences()
        self._preemption = Preemption(pool, ledger, host_pool, self._live)
        self._generated = GeneratedBlocks(pool, ledger.block_size)
        self._parking = Parking(self._live)
        self._pieces = PromptPieces(self._live, mixes=mixes_prompts, chunk_tokens=chunk_tokens)
        self._forks: dict[Sequence, BlockCopy] = {}  # to run with the next decision

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place in the batch."""
        return len(self._live.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch, and those that were taken out of it to be moved."""
        return len(self._live.running) + len(self._live.parked)

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is in the host's memory."""
        return len(self._live.swapped)

    @property
    def num_preemptions(self) -> int:
        """Victims so far, swapped or returned."""
        return self._preemption.count

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts that are computed here."""
        return sum(num_to_compute(sequence) for sequence in self._live.prompts)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence whose KV has landed, all but its last token's; or one whose KV is here
        in part: the rest, its last token's too, is computed here. Its claim is for all these rows.
        """
        claim = claim_of(sequence)
        num_rows = len(sequence.token_ids) - (0 if num_to_compute(sequence) else 1)
        assert claim.rows == num_rows, "the claim is another's"
        assert claim.rows <= len(lease_of(sequence).blocks) * self._block_size, (
            "rows without blocks"
        )
        if num_to_compute(sequence):
            self._live.prompts[sequence] = None
        self._generated.begin(sequence)
        self._live.waiting[sequence] = None

    def fork(self, sequence: Sequence, source: int | None) -> None:
        """Takes a further answer to a prompt whose rows have landed in another's lease.

        Its own lease begins with the prompt's full blocks, shared, and goes on with those of
        `CapacityLedger.bind_fork`. `source`: the prompt's last, partial block, whose rows are
        copied to the first of its own before the next step; the caller has referred to it once
        more (`BlockPool.share`), which ends with the copy. None where the prompt fills its blocks.
        """
        if source is not None:
            target = lease_of(sequence).blocks[sequence.num_computed // self._block_size]
            self._forks[sequence] = BlockCopy(source, target)
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence wherever it stands; the caller releases its lease."""
        if sequence.state is SequenceState.DONE:
            return
        if sequence.state is SequenceState.SWAPPED:
            self._free_slots(self._live.swapped.pop(sequence).slots)
        elif sequence.state is SequenceState.WAITING:
            del self._live.waiting[sequence]
        elif sequence.state is SequenceState.PARKED:
            del self._live.parked[sequence]
        else:
            del self._live.running[sequence]
        self._parking.forget(sequence)
        self._live.prompts.pop(sequence, None)
        if (copy := self._forks.pop(sequence, None)) is not None:
            self._pool.free([copy.source])
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if sequence.num_output_tokens:  # else it was stopped before its first
                self._ledger.record(sequence.num_output_tokens)
        elif sequence.finish_reason is FinishReason.BROKEN:
            self._pool.unregister(lease_of(sequence).blocks)  # their rows may be what broke it
        self._ledger.withdraw(claim_of(sequence))
        sequence.move_to(SequenceState.DONE)

    def park(self, sequence: Sequence, number: int) -> None:
        """It is to leave the batch, for the move of that number. See `Parking`."""
        self._parking.want(sequence, number)

    def take_parked(self) -> list[tuple[Sequence, int]]:
        """Those that have left it since the last call, and have not ended."""
        return self._parking.take_parked()

    def resume(self, sequence: Sequence) -> None:
        """It goes on here after all."""
        self._parking.resume(sequence)

    def note_waiting(self, wanted: SequenceOf[Newcomer]) -> None:
        """Who waits to be admitted, the first first: sequences of lower priority make room."""
        self._live.wanted = list(wanted)

    def schedule(self, now: float) -> Decision | None:
        """One new token for each sequence that can have one, and pieces of the prompts that are
        computed here; None where there is nothing to do.

        A sequence whose last token is on its way takes no part.
        """
        self._age(now)
        self._parking.park()
        plan = Decision([], copies=list(self._forks.values()))
        self._forks.clear()
        for copy in plan.copies:
            self._pool.share([copy.target])  # it stays until the copy is done, come what may
            plan.free_after.extend(([copy.source], [copy.target]))
        takers = [s for s in self._live.running if not s.ends_unread]
        hand: list[int] = []  # blocks of victims that are given out again here
        preempted = self._preemption.make_room(takers, plan, hand, now)
        ready = self._grow(takers, hand)
        if not preempted:
            self._preemption.make_room_above(plan, hand, now)
            ready = [s for s in ready if s.state is SequenceState.RUNNING]
            self._fill_batch(plan, hand, ready)
        else:
            self._join_waiting(plan, hand, ready)
        self._pieces.plan(plan, ready)
        plan.free_after.extend([block] for block in hand)
        if not (plan.parts or plan.copies or plan.swap_outs or plan.swap_ins or plan.returned):
            return None
        self._live.unsettled.append(plan)
        return plan

    def commit(self, step: Step) -> None:
        """Notes the rows of KV that each sequence gained."""
        for part in step.parts:
            sequence, claim = part.sequence, claim_of(part.sequence)
            sequence.num_computed += part.num_tokens
            claim.rows = max(claim.rows, sequence.num_computed)
        self._pieces.commit()

    def settle(self, step: Step) -> None:
        """The device has done it all: gives back the blocks of those that yielded, and makes those
        findable that became full.
        """
        decision = self._live.unsettled.pop(0)
        assert decision is step, "settled out of order"
        for blocks in decision.free_after:
            self._pool.free(blocks)
        for part in decision.parts:
            self._generated.note_rows(part.sequence, part.num_tokens)

    # Who gets a block, or a place.

    def _needs_block(self, sequence: Sequence) -> bool:
        return needs_block(sequence, self._block_size)

    def _grow(self, takers: list[Sequence], hand: list[int]) -> list[Sequence]:
        """Those of `takers` that have a place for their next row; the oldest are served first."""
        needy = [s for s in takers if self._needs_block(s)]
        without = {s for s in sorted(needy, key=rank) if not self._give_block(s, hand)}
        return [s for s in takers if s not in without]

    def _give_block(self, sequence: Sequence, hand: list[int]) -> bool:
        claim = claim_of(sequence)
        block = self._ledger.take_promised(claim) if claim.promised else None
        if block is None:
            taken = [hand.pop()] if hand else self._pool.allocate(1)
            if taken is None:
                return False
            [block] = taken
            claim.own_blocks += 1
        lease_of(sequence).blocks.append(block)
        return True

    def _fill_batch(self, plan: Decision, hand: list[int], ready: list[Sequence]) -> None:
        """Brings back and lets in, oldest of the highest priority first, while there are places.

        A swapped one that does not fit holds back the other swapped ones, not those whose KV is
        here: their blocks are of use only in the batch.
        """
        swapped = dict(self._live.swapped)  # in order, whatever the hashes
        blocked = False
        for sequence in sorted((*swapped, *self._live.waiting), key=rank):
            if len(self._live.running) >= self._max_batch_size:
                break
            if sequence not in swapped:
                self._join(sequence, plan, hand, ready)
            elif not blocked:
                blocked = not self._bring_back(sequence, plan, hand, ready)

    def _join_waiting(self, plan: Decision, hand: list[int], ready: list[Sequence]) -> None:
        for sequence in sorted(self._live.waiting, key=rank):
            if len(self._live.running) >= self._max_batch_size:
                break
            self._join(sequence, plan, hand, ready)

    def _join(
        self, sequence: Sequence, plan: Decision, hand: list[int], ready: list[Sequence]
    ) -> None:
        if self._needs_block(sequence) and not self._give_block(sequence, hand):
            return
        del self._live.waiting[sequence]
        sequence.move_to(SequenceState.RUNNING)
        self._live.running[sequence] = None
        ready.append(sequence)

    def _bring_back(
        self, sequence: Sequence, plan: Decision, hand: list[int], ready: list[Sequence]
    ) -> bool:
        if any(out.sequence is sequence for out in plan.swap_outs):
            return False  # its KV is not in the host's memory yet
        claim = claim_of(sequence)
        count = self._blocks_to_return(sequence)
        ahead = [w for w in self._live.wanted if w.priority > claim.priority]
        # When nothing else is here, the expectation does not matter: it may grow to the end. But
        # one that is about to come in, for which it may just have made room, goes first.
        others = self._live.running or self._live.waiting or self._about_to_enter(ahead)
        if others and not self._ledger.may_return(claim, count, len(hand), ahead):
            return False
        taken = self._pool.allocate(max(0, count - len(hand)))
        if taken is None:
            return False
        while len(taken) < count:
            taken.append(hand.pop())
        lease_of(sequence).blocks.extend(taken)
        slots = self._live.swapped.pop(sequence).slots
        claim.swapped = False
        claim.own_blocks = count
        plan.swap_ins.append(SwapIn(sequence, slots, taken[: len(slots)]))
        self._free_slots(slots)  # a later decision's copies run after this one's
        sequence.move_to(SequenceState.RUNNING)
        self._live.running[sequence] = None
        if not sequence.ends_unread:
            ready.append(sequence)
        return True

    def _about_to_enter(self, ahead: list[Newcomer]) -> bool:
        coming = self._preemption.num_blocks_coming()
        return bool(ahead) and self._ledger.may_enter(ahead[0], coming)

    def _blocks_to_return(self, sequence: Sequence) -> int:
        """For the rows that the next steps write: one, or what is left of a prompt."""
        return blocks_for(sequence.num_known_or_unread, self._block_size)

    def _free_slots(self, slots: list[int]) -> None:
        assert self._host_pool is not None, "swapped without a place to swap to"
        self._host_pool.free(slots)

    def _age(self, now: float) -> None:
        for sequence, swapped in self._live.swapped.items():
            if now - swapped.since >= BATCH_AGEING_S:
                claim_of(sequence).priority = Priority.INTERACTIVE
