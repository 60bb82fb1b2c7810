"""A pool, its ledger and a TicketBook over them, without engine and sockets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.worker.handoff.tickets import (
    AttemptKey,
    LandedAnswer,
    Ticket,
    TicketBook,
    TicketRequest,
    TicketState,
)
from legato.worker.kv.block_pool import BlockPool
from legato.worker.priority import Priority
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule, Claim, Newcomer
from legato.worker.scheduling.output_lengths import OutputLengths

if TYPE_CHECKING:
    from legato.worker.kv.block_lease import BlockLease

BLOCK_SIZE = 4
KEY = AttemptKey("r", 0)


def ticket_request(
    rows: int,
    max_tokens: int = 2,
    *,
    num_answers: int = 1,
    priority: Priority = Priority.INTERACTIVE,
    arrival: int = 0,
    content: int | None = None,
) -> TicketRequest:
    """`content` names the tokens, so that requests with the same one share blocks; None: none."""
    full = rows // BLOCK_SIZE if content is not None else 0
    newcomer = Newcomer(
        rows=rows,
        max_rows=rows + max_tokens - 1,
        max_tokens=max_tokens,
        priority=priority,
        num_answers=num_answers,
    )
    hashes = [b"%d:%d" % (content or 0, place) for place in range(full)]
    return TicketRequest(newcomer, arrival, list(range(rows)), hashes)


@dataclass
class TicketRoom:
    """`engine` stands for those whose claims and leases the engine has."""

    pool: BlockPool
    ledger: CapacityLedger
    book: TicketBook
    clock: list[float]  # of one number: now
    told: list[list[Newcomer]]  # `wanted`, each time that something changed
    tickets: list[Ticket] = field(default_factory=list)
    engine: list[LandedAnswer] = field(default_factory=list)

    @classmethod
    def of(
        cls, num_blocks: int, *, expected: int = 1, mode: AdmissionMode = AdmissionMode.EXPECTED
    ) -> TicketRoom:
        pool, clock, told = BlockPool(num_blocks), [0.0], list[list[Newcomer]]()
        lengths = OutputLengths(prior_tokens=expected)
        ledger = CapacityLedger(pool, BLOCK_SIZE, AdmissionRule(mode), lengths)
        book = TicketBook(
            pool,
            ledger,
            block_size=BLOCK_SIZE,
            on_change=lambda: told.append(book.wanted()),
            now=lambda: clock[0],
        )
        return cls(pool, ledger, book, clock, told)

    def reserve(self, request: TicketRequest) -> Ticket:
        ticket = self.book.reserve(KEY, request)
        self.tickets.append(ticket)
        return ticket

    def landed(self, request: TicketRequest) -> Ticket:
        ticket = self.reserve(request)
        self.book.begin_landing(ticket)
        self.book.finish_landing(ticket)
        return ticket

    def hand_over(self, ticket: Ticket) -> list[LandedAnswer]:
        answers = self.book.hand_over(ticket)
        self.engine += answers
        return answers

    def end(self, answer: LandedAnswer) -> None:
        """As the engine does at its end, wherever it stands."""
        self.engine.remove(answer)
        if answer.source is not None:
            self.pool.free([answer.source])
        self.ledger.withdraw(answer.claim)
        answer.lease.release()

    def check(self, pinned: list[BlockLease] | None = None) -> None:
        """Every block and promise belongs to exactly those that there are."""
        self.pool.check_integrity()
        mine = [t for t in self.tickets if self.book.find(t.epoch) is t]
        owned = [t for t in mine if t.state is not TicketState.DECODING]
        claims: list[Claim] = [c for t in owned for c in t.claims]
        claims += [answer.claim for answer in self.engine]
        leases = {id(t.lease): t.lease for t in owned if t.lease is not None}
        leases |= {id(answer.lease): answer.lease for answer in self.engine}
        leases |= {id(lease): lease for lease in pinned or []}
        right = Counter(block for lease in leases.values() for block in lease.blocks)
        right.update(a.source for a in self.engine if a.source is not None)
        assert self.pool.references() == dict(right), "held blocks are not those in use"
        assert self.pool.usage().reserved == sum(claim.promised for claim in claims)
        assert len(self.ledger) == len(claims)
        assert len(self.book) == len(mine)
