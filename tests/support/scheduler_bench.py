"""Bench: the decode scheduler that preempts, and all around it, without tensor, thread or clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.protos.prefix_hash import PrefixHasher
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.priority import Priority
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule, Newcomer
from legato.worker.scheduling.output_lengths import OutputLengths
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.worker.scheduling.decision import Decision

BLOCK_SIZE = 4
BATCH = Priority.BATCH


@dataclass
class Bench:
    """A scheduler and all around it; `expected=1`: everybody is thought to end at once."""

    num_blocks: int
    num_slots: int = 0
    max_batch_size: int = 8
    expected: int = 1
    mode: AdmissionMode = AdmissionMode.EXPECTED
    mixes_prompts: bool = True
    now: float = 0.0
    arrivals: int = 0
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.host_pool = BlockPool(self.num_slots) if self.num_slots else None
        self.ledger = CapacityLedger(
            self.pool,
            BLOCK_SIZE,
            AdmissionRule(self.mode),
            OutputLengths(window=1, prior_tokens=self.expected),
        )
        self.scheduler = CapacityScheduler(
            self.pool,
            self.ledger,
            self.max_batch_size,
            self.host_pool,
            mixes_prompts=self.mixes_prompts,
        )

    def join(
        self,
        prompt: int,
        max_tokens: int,
        priority: Priority = Priority.INTERACTIVE,
        num_preemptions: int = 0,
    ) -> Sequence:
        """Admitted, landed and handed to the scheduler."""
        newcomer = Newcomer(prompt, prompt + max_tokens - 1, max_tokens, priority, num_preemptions)
        [claim] = self.ledger.admit(newcomer)
        blocks, _ = self.ledger.bind(claim)
        made = self.sequence(prompt, max_tokens)
        made.lease, made.claim = BlockLease(self.pool, blocks), claim
        self.scheduler.add(made)
        return made

    def begin(self, prompt: int, max_tokens: int, hashes: list[bytes] | None = None) -> Sequence:
        """Admitted, and its prompt is to be computed here; `hashes` name its full blocks."""
        [claim] = self.ledger.admit(Newcomer(prompt, prompt + max_tokens - 1, max_tokens))
        blocks, num_found = self.ledger.bind(claim, (hashes or [])[: (prompt - 1) // BLOCK_SIZE])
        made = self.sequence(prompt, max_tokens)
        del made.token_ids[-1], made.output_token_ids[-1]
        made.num_computed = num_found * BLOCK_SIZE
        made.block_hashes = list(hashes or [])
        made.hasher = PrefixHasher("named", BLOCK_SIZE, kv_kind="none") if hashes else None
        made.lease, made.claim = BlockLease(self.pool, blocks), claim
        self.scheduler.add(made)
        return made

    def sequence(self, prompt: int, max_tokens: int) -> Sequence:
        self.arrivals += 1
        params = SamplingParams.greedy_for(max_tokens, ignore_eos=True)
        tokens = list(range(prompt + 1))
        made = Sequence(tokens, prompt, params, frozenset(), num_computed=prompt)
        made.arrival = self.arrivals
        return made

    def step(self) -> Decision:
        """Schedule, commit, settle, and one token for each part that samples."""
        decision = self.scheduler.schedule(self.now)
        assert decision is not None, "nothing to do"
        sampling = [part.samples for part in decision.parts]
        self.scheduler.commit(decision)
        self.scheduler.settle(decision)
        for part, samples in zip(decision.parts, sampling, strict=True):
            if samples and part.sequence.append(5) is not None:
                self.end(part.sequence)
        self.decisions.append(decision)
        self.pool.check_integrity()
        return decision

    def steps(self, count: int) -> list[Decision]:
        return [self.step() for _ in range(count)]

    def end(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.scheduler.remove(sequence)
        sequence.lease.release()


def parts(decision: Decision) -> list[Sequence]:
    return [part.sequence for part in decision.parts]


def victims(decisions: list[Decision]) -> list[Sequence]:
    return [out.sequence for d in decisions for out in d.swap_outs] + [
        sequence for d in decisions for sequence in d.returned
    ]
