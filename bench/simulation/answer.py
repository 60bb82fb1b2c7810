"""Answer: one stream of tokens that a simulated client gets, over all its stays on the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.bench.simulation.kv_model import (
    END_TOKEN,
    AnswerAlone,
    next_token,
    prompt_token,
    row_of,
)
from legato.protos.prefix_hash import PrefixHasher
from legato.worker.sampling_params import SamplingParams
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.bench.simulation.workload import Request
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.scheduling.claim import Claim


class Outcome(Enum):
    """How it went."""

    FINISHED = auto()
    CANCELLED = auto()  # by the client, or at the deadline
    REFUSED = auto()  # can never fit


@dataclass(eq=False)
class Answer:
    """The oracle of the right tokens, and where the answer stands."""

    request: Request
    index: int  # among the answers to the request
    block_size: int
    emitted: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    # Of the present stay on the worker, from admission to its end:
    claim: Claim | None = None
    lease: BlockLease | None = None
    sequence: Sequence | None = None
    num_found_blocks: int = 0  # that the pool had already
    num_preemptions: int = 0
    admitted_s: float | None = None
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self._alone = AnswerAlone(
            self.content, self.seed, self.request.num_prompt_tokens, self.block_size
        )

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.request.number}.{self.index}"

    @property
    def content(self) -> int:
        """Names the prompt: the answers to one request share its KV."""
        return self.request.content + 1

    @property
    def seed(self) -> int:
        """Of its own: the answers to one request differ."""
        return hash((self.request.number, self.index))

    def emit(self, token: int) -> None:
        """The client gets a token; AssertionError where it is not the right one."""
        right = self._finish_or(self._alone.next(), len(self.emitted))
        assert token == right, (
            f"answer {self.name}: token {len(self.emitted)} is {token}, alone it is {right}: "
            f"its KV is not what it wrote"
        )
        self.emitted.append(token)

    def sample(self, num_rows: int, digests: list[int]) -> int:
        """The token behind `num_rows` rows whose blocks have these digests."""
        token = next_token(self.seed, num_rows, digests)
        return self._finish_or(token, num_rows - self.request.num_prompt_tokens)

    def prefill(self) -> int:
        """The token that prefill gives: the KV there is right by definition."""
        alone = AnswerAlone(
            self.content, self.seed, self.request.num_prompt_tokens, self.block_size
        )
        for _ in self.emitted:
            alone.next()
        return self._finish_or(alone.next(), len(self.emitted))

    def token(self, position: int) -> int:
        """Of the prompt and what was emitted."""
        num_prompt = self.request.num_prompt_tokens
        if position < num_prompt:
            return prompt_token(self.content, position)
        return self.emitted[position - num_prompt]

    def row(self, position: int, token: int) -> int:
        """The KV of one of its tokens."""
        return row_of(self.content, position, token)

    def tokens(self) -> list[int]:
        """The prompt and what was emitted."""
        return [self.token(p) for p in range(self.request.num_prompt_tokens + len(self.emitted))]

    def hasher(self) -> PrefixHasher:
        """Names its blocks: prompts with the same content share theirs."""
        return PrefixHasher("simulated", self.block_size, str(self.content), kv_kind="numbers")

    def new_sequence(self, *, named: bool, num_computed: int | None = None) -> Sequence:
        """As the Decode call would make it, once all rows but the last token's have landed; or with
        the first `num_computed` rows, where the worker computes the rest itself.

        `named`: the worker has a prefix cache.
        """
        num_prompt = self.request.num_prompt_tokens
        tokens = self.tokens()
        assert self.claim is not None
        return Sequence(
            token_ids=tokens,
            num_prompt_tokens=num_prompt,
            params=SamplingParams.greedy_for(self.request.max_tokens),
            eos_token_ids=frozenset((END_TOKEN,)),
            num_computed=len(tokens) - 1 if num_computed is None else num_computed,
            hasher=self.hasher() if named else None,
            lease=self.lease,
            arrival=self.request.number * 16 + self.index,
            claim=self.claim,
        )

    def _finish_or(self, token: int, index: int) -> int:
        return END_TOKEN if index + 1 == self.request.num_output_tokens else token
