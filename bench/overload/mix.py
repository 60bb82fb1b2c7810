"""Mix: the requests of an overload run, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from legato.protos import common_pb2, generation_pb2

PROMPT_TOKENS = (16, 128)  # of a prompt, evenly between
OUTPUT_TOKENS = (16, 48)
BATCH_SHARE = 0.3
# The vocabulary of every model has these, and no control token is among them.
TOKEN_IDS = (97, 122)


@dataclass(frozen=True)
class Deadlines:
    """Seconds, by priority."""

    interactive_s: float
    batch_s: float

    def of(self, request: generation_pb2.GenerateRequest) -> float:
        """Of one request."""
        is_batch = request.priority == common_pb2.PRIORITY_BATCH
        return self.batch_s if is_batch else self.interactive_s


class Mix:
    """The same seed draws the same requests. No two prompts begin alike, so none is cached."""

    def __init__(self, seed: int, batch_share: float = BATCH_SHARE) -> None:
        self._dice = random.Random(seed)
        self._batch_share = batch_share

    def draw(self) -> generation_pb2.GenerateRequest:
        """The next request; its answer is as long as it may be."""
        dice = self._dice
        is_batch = dice.random() < self._batch_share
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(
                ids=[dice.randint(*TOKEN_IDS) for _ in range(dice.randint(*PROMPT_TOKENS))]
            ),
            sampling=common_pb2.SamplingParams(
                max_tokens=dice.randint(*OUTPUT_TOKENS), temperature=0.0, ignore_eos=True
            ),
            priority=common_pb2.PRIORITY_BATCH if is_batch else common_pb2.PRIORITY_INTERACTIVE,
        )

    def gap_s(self, rate: float) -> float:
        """Until the next arrival of a Poisson process with so many a second."""
        return self._dice.expovariate(rate)
