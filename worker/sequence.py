"""Sequence: one request's tokens and progress inside one worker's engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.worker.prompt_scores import PromptScores

if TYPE_CHECKING:
    from legato.protos.prefix_hash import PrefixHasher
    from legato.text.guide_matcher import GuideMatcher
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.progress import KvProgress
    from legato.worker.sampling_params import SamplingParams
    from legato.worker.scheduling.claim import Claim


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = auto()
    LENGTH = auto()
    BROKEN = auto()  # the model gave no usable logits: there is no last token


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # queued, nothing computed
    RUNNING = auto()  # in the schedule: its blocks are pinned by the engine
    SWAPPED = auto()  # preempted: its KV is in host memory, it has no blocks
    PARKED = auto()  # in no step: its KV is about to go to another worker
    DONE = auto()  # out of the schedule: finished here, or removed

    def can_become(self, target: SequenceState) -> bool:
        """Whether `target` may follow."""
        return (self, target) in {
            (SequenceState.WAITING, SequenceState.RUNNING),
            (SequenceState.WAITING, SequenceState.DONE),
            (SequenceState.RUNNING, SequenceState.DONE),
            (SequenceState.WAITING, SequenceState.SWAPPED),
            (SequenceState.RUNNING, SequenceState.SWAPPED),
            (SequenceState.SWAPPED, SequenceState.RUNNING),
            (SequenceState.SWAPPED, SequenceState.DONE),
            (SequenceState.RUNNING, SequenceState.PARKED),
            (SequenceState.PARKED, SequenceState.WAITING),
            (SequenceState.PARKED, SequenceState.DONE),
        }


@dataclass(eq=False, repr=False)  # no repr: prompts do not belong into logs
class Sequence:
    """Owned by the engine thread once submitted.

    `token_ids` is the prompt and every token emitted so far. KV exists for the first
    `num_computed` of them; the last emitted token has none until a decode step processes it.
    A device may have sampled `num_unread` more, whose values have not come back yet.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    num_computed: int = 0
    num_answers: int = 1  # first tokens to sample, all from the same logits; more in prefill only
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks; [] where none are
    # On a decode worker with a prefix cache: names the blocks that the answer fills.
    hasher: PrefixHasher | None = None
    num_settled: int = 0  # of `num_computed` in decode, those that the device has certainly written
    num_registered: int = 0  # first blocks of the lease that need not be registered any more
    num_cached: int = 0  # of `num_computed`, those that were found in the prefix cache
    num_unread: int = 0  # 0 or 1
    finish_reason: FinishReason | None = None
    lease: BlockLease | None = None
    progress: KvProgress | None = None  # in prefill, of who wants the rows as they come
    guide: GuideMatcher | None = None  # where `params` has one
    guide_failure: str | None = None  # why it cannot go on: the sequence ends without another token
    state: SequenceState = SequenceState.WAITING
    arrival: int = 0  # the lesser came first to the router
    claim: Claim | None = None  # on a decode worker's pool; knows priority and preemptions
    num_swaps: int = 0  # times that its KV was moved to the host's memory
    num_forwards: int = 0
    model_s: float = 0.0
    submitted_at_s: float = 0.0
    first_step_at_s: float | None = None
    # Ids that may not be sampled before min_tokens; they are also what ends the answer after it.
    end_token_ids: frozenset[int] = field(init=False)
    # Kept apart as well, because the sampler wants them at every step without a copy.
    prompt_token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(init=False)
    prompt_scores: PromptScores | None = field(init=False)  # where the request wants them

    def __post_init__(self) -> None:
        # With a guide EOS comes only where it may: see `end_with`.
        ignores = self.params.ignore_eos and self.params.guide is None
        eos = frozenset() if ignores else self.eos_token_ids
        self.end_token_ids = eos | self.params.stop_token_ids
        self.block_hashes = list(self.block_hashes)  # its own: decode appends to it
        self.prompt_token_ids = self.token_ids[: self.num_prompt_tokens]
        self.output_token_ids = self.token_ids[self.num_prompt_tokens :]
        count = self.params.prompt_logprobs
        self.prompt_scores = None if count is None else PromptScores(count)

    @property
    def num_output_tokens(self) -> int:
        """Emitted so far."""
        return len(self.output_token_ids)

    @property
    def next_index(self) -> int:
        """The place in the answer of the next token to sample."""
        return len(self.output_token_ids) + self.num_unread

    @property
    def num_known_or_unread(self) -> int:
        """Tokens that a step can take as input, read back or not."""
        return len(self.token_ids) + self.num_unread

    @property
    def ends_unread(self) -> bool:
        """True where the token that has not come back is the last one in any case."""
        return self.num_unread > 0 and self.next_index >= self.params.max_tokens

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """What the next token must not be."""
        if self.next_index < self.params.min_tokens:
            return self.end_token_ids
        return frozenset()

    def move_to(self, target: SequenceState) -> None:
        """Changes the state and keeps the engine's pin in step with it."""
        assert self.state.can_become(target), f"{self.state} cannot become {target}"
        assert self.lease is not None or target is SequenceState.DONE, "running without blocks"
        if target is SequenceState.RUNNING and self.lease is not None:
            self.lease.acquire()
        if self.state is SequenceState.RUNNING and self.lease is not None:
            self.lease.drop()
        self.state = target

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a sampled token; returns why the answer ends with it, or None."""
        self.finish_reason = self.end_with(token_id)
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        return self.finish_reason

    def end_with(self, token_id: int) -> FinishReason | None:
        """Why the answer would end, were this its next token; None where it goes on."""
        index = self.num_output_tokens
        # Before min_tokens a guide lets one of these come only where nothing else can.
        may_end = index >= self.params.min_tokens or self.params.guide is not None
        if token_id in self.end_token_ids and may_end:
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.params.max_tokens else None
