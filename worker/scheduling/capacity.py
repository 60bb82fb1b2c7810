"""CapacityLedger: who has a claim on the KV pool, how far it may grow, and who may come in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from legato.worker.kv.block_pool import blocks_for
from legato.worker.scheduling.claim import AdmissionMode, Claim, NeverFitsError, NoRoomNowError
from legato.worker.scheduling.growth import Growth, peak_blocks
from legato.worker.scheduling.output_lengths import OutputLengths

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.priority import Priority
    from legato.worker.scheduling.claim import AdmissionRule, Newcomer


class CapacityLedger:
    """Used by the event loop, which admits, and by the engine thread, which grows and ends.

    With `EXPECTED`, a newcomer enters when the pool has the blocks for its rows and, by what
    answers were like of late, at no later moment everybody's blocks exceed the pool: those that
    run, those whose KV is arriving, and those that were swapped out and will return. Those of
    lower priority count only with what they hold, for they will yield; one that was preempted
    `max_preemptions` times yields no more and counts in full. Each preemption halves the risk
    taken with a sequence, and at `max_preemptions` it is taken for as long as it may get.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        rule: AdmissionRule,
        lengths: OutputLengths | None = None,
    ) -> None:
        self.rule = rule
        self.block_size = block_size
        self._pool = pool
        self._lengths = lengths if lengths is not None else OutputLengths()
        self._claims: dict[Claim, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._claims)

    def check_can_fit(self, newcomer: Newcomer) -> None:
        """Raises NeverFitsError, with the numbers, where an empty pool would be too small."""
        most = self._strict_blocks(newcomer)
        if most > self._pool.total:
            each = (
                f" for each of {newcomer.num_answers} answers" if newcomer.num_answers > 1 else ""
            )
            raise NeverFitsError(
                f"{newcomer.max_rows} rows of KV{each} "
                f"need {most} blocks of {self.block_size} tokens; "
                f"this worker has {self._pool.total} in all"
            )

    def admit(self, newcomer: Newcomer, ahead: Iterable[Newcomer] = ()) -> list[Claim]:
        """One claim for each answer; the pool has promised their blocks.

        `ahead`: those that wait and must not be delayed: for a batch newcomer, the interactive
        ones. Of n answers, the first claim counts the shared blocks.

        Raises:
            NeverFitsError, NoRoomNowError: and nothing is promised.
        """
        self.check_can_fit(newcomer)
        with self._lock:
            claims = self._claims_of(newcomer)
            now = self._landing_blocks_of(newcomer)
            available = self._pool.usage().available
            if self.rule.mode is AdmissionMode.RESERVE:
                wanted = now + sum(self._strict_blocks(other) for other in ahead)
            else:
                wanted = now
            if wanted > available:
                raise NoRoomNowError(f"{wanted} blocks are needed now; {available} are available")
            if self.rule.mode is AdmissionMode.EXPECTED:
                peak = self._peak_with(newcomer, ahead)
                if peak > self._pool.total:
                    raise NoRoomNowError(
                        f"{peak} blocks are expected to be needed at one time; "
                        f"this worker has {self._pool.total}"
                    )
            if not self._pool.reserve(now):
                raise NoRoomNowError(f"{now} blocks are needed now; others were quicker")
            self._claims.update(dict.fromkeys(claims))
            return claims

    def bind(self, claim: Claim, block_hashes: SequenceOf[bytes] = ()) -> tuple[list[int], int]:
        """Turns the promise for the rows that will be handed over into blocks.

        Of a request with several answers only the first claim's; the others' follow when they are
        forked from it (`bind_fork`).

        Returns:
            The blocks in order, and how many first ones the pool had already: their rows need not
            be sent.
        """
        with self._lock:
            count = self._landing_blocks(claim.rows, claim.max_rows)
            bound = self._pool.acquire_reserved(block_hashes, count, count)
            assert bound is not None, "a promise was not kept"
            blocks, num_found = bound
            claim.promised -= count
            claim.own_blocks -= max(0, num_found - claim.num_shared_blocks)
            claim.num_shared_blocks = max(num_found, claim.num_shared_blocks)
            return blocks, num_found

    def bind_fork(self, claim: Claim) -> list[int]:
        """The blocks behind the shared ones, of an answer that goes on from another's rows."""
        with self._lock:
            count = self._landing_blocks(claim.rows, claim.max_rows) - claim.num_shared_blocks
            claim.promised -= count
            return self._pool.allocate_reserved(count)

    def take_promised(self, claim: Claim) -> int | None:
        """One more of the blocks that were promised; None where none is left."""
        with self._lock:
            if claim.promised == 0:
                return None
            claim.promised -= 1
            return self._pool.allocate_reserved(1)[0]

    def withdraw(self, claim: Claim) -> None:
        """The sequence has ended, or left. Its blocks are freed by who holds them. Idempotent."""
        with self._lock:
            if claim.withdrawn:
                return
            claim.withdrawn = True
            del self._claims[claim]
            self._pool.unreserve(claim.promised)
            claim.promised = 0

    def record(self, num_tokens: int) -> None:
        """An answer has come to its end."""
        with self._lock:
            self._lengths.record(num_tokens)

    def may_return(
        self, claim: Claim, num_blocks: int, freed: int = 0, ahead: Iterable[Newcomer] = ()
    ) -> bool:
        """Whether a swapped sequence, with `num_blocks` at first, fits beside those that are there.

        Other swapped ones do not count: it is the first of them. `freed`: as if so many blocks
        were available; `ahead`: as if these had entered.
        """
        with self._lock:
            entering, fixed = [self._growth(claim)], 0
            for newcomer in ahead:
                num_blocks += self._landing_blocks_of(newcomer)
                fixed += self._num_shared(newcomer)
                entering += [self._growth(each) for each in self._claims_of(newcomer)]
            if num_blocks > self._pool.usage().available + freed:
                return False
            peak = self._peak(claim.priority, entering, fixed, with_swapped=False)
            return peak - freed <= self._pool.total

    def may_enter(self, newcomer: Newcomer, freed: int) -> bool:
        """Whether a newcomer would be admitted, were `freed` more blocks free."""
        with self._lock:
            if self._landing_blocks_of(newcomer) > self._pool.usage().available + freed:
                return False
            if self.rule.mode is AdmissionMode.RESERVE:
                return True
            return self._peak_with(newcomer) - freed <= self._pool.total

    def blocks_to_enter(self, newcomer: Newcomer) -> int:
        """What the pool must have for it at once."""
        return self._landing_blocks_of(newcomer)

    # Below: with the lock held.

    def _peak(
        self, priority: Priority, entering: list[Growth], fixed: int, *, with_swapped: bool = True
    ) -> int:
        """Blocks at the worst moment to come, with `entering` there from now on.

        `fixed`: blocks that come with these and do not go with them.
        """
        growths = list(entering)
        usage = self._pool.usage()
        fixed += usage.total - usage.available
        for claim in self._claims:
            yields = claim.priority < priority and not self._is_protected(claim)
            if yields or (claim.swapped and not with_swapped):
                continue
            growths.append(self._growth(claim))
            fixed -= claim.own_blocks  # counted with its growth instead
        # One that has all its rows is gone after a step, in which the others have grown already.
        growing = [g for g in growths if g.steps_left > 0]
        fixed += sum(
            blocks_for(g.rows, self.block_size) - g.shared_blocks
            for g in growths
            if g.steps_left == 0
        )
        return fixed + peak_blocks(growing, self.block_size)

    def _peak_with(self, newcomer: Newcomer, ahead: Iterable[Newcomer] = ()) -> int:
        entering, fixed = [], 0
        for each in (*ahead, newcomer):
            fixed += self._num_shared(each)
            entering += [self._growth(claim) for claim in self._claims_of(each)]
        return self._peak(newcomer.priority, entering, fixed)

    def _growth(self, claim: Claim) -> Growth:
        return Growth(claim.rows, self._expected_rows(claim), claim.num_shared_blocks)

    def _expected_rows(self, claim: Claim) -> int:
        if self._is_protected(claim):
            return claim.max_rows
        prompt_rows = claim.max_rows - claim.max_tokens
        quantile = 1 - self.rule.risk / 2**claim.num_preemptions
        emitted = claim.rows - prompt_rows
        return prompt_rows + self._lengths.expected(claim.max_tokens, emitted, quantile)

    def _is_protected(self, claim: Claim) -> bool:
        return claim.num_preemptions >= self.rule.max_preemptions

    def _landing_blocks(self, rows: int, max_rows: int) -> int:
        """With room for the first step's row: it shall not need another's block at once."""
        return blocks_for(min(rows + 1, max_rows), self.block_size)

    def _landing_blocks_of(self, newcomer: Newcomer) -> int:
        """What admitting it takes from the pool at once."""
        return sum(claim.promised for claim in self._claims_of(newcomer))

    def _num_shared(self, newcomer: Newcomer) -> int:
        return newcomer.rows // self.block_size if newcomer.num_answers > 1 else 0

    def _strict_blocks(self, newcomer: Newcomer) -> int:
        shared = self._num_shared(newcomer)
        own = blocks_for(newcomer.max_rows, self.block_size) - shared
        return shared + newcomer.num_answers * own

    def _claims_of(self, newcomer: Newcomer) -> list[Claim]:
        """Claims whose promises the pool has yet to make."""
        strict = self.rule.mode is AdmissionMode.RESERVE
        landing = self._landing_blocks(newcomer.rows, newcomer.max_rows)
        blocks = blocks_for(newcomer.max_rows, self.block_size) if strict else landing
        shared = self._num_shared(newcomer)
        return [
            Claim(
                priority=newcomer.priority,
                rows=newcomer.rows,
                max_rows=newcomer.max_rows,
                max_tokens=newcomer.max_tokens,
                num_preemptions=newcomer.num_preemptions,
                own_blocks=blocks - shared,
                num_shared_blocks=shared,
                promised=blocks - (shared if answer else 0),
            )
            for answer in range(newcomer.num_answers)
        ]
