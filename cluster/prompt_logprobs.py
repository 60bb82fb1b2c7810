"""PromptLogprobs: those of one request's prompt: asked of workers until they come, told once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.cluster.attempt_errors import WorkerFaultError
from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.protos import generation_pb2, worker_pb2

# From so many numbers on it takes milliseconds to make messages of them: not on the event loop.
MANY_NUMBERS = 4096


class PromptLogprobs:
    """Whoever computes the prompt first brings them; a later computation is not asked for them."""

    def __init__(self, count: int | None, num_prompt_tokens: int) -> None:
        """`count`: of the most likely tokens, at each of the prompt; None: nothing is wanted."""
        self._count = count
        self._num_prompt_tokens = num_prompt_tokens
        self._waiting: worker_pb2.PromptLogprobs | None = None  # came, and was not told

    def ask(self, sampling: common_pb2.SamplingParams) -> None:
        """Puts the wish into what a worker is told, unless they have come."""
        if self._count is not None:
            sampling.prompt_logprobs = self._count

    def take(self, first: worker_pb2.FirstToken) -> None:
        """What came with a first token.

        Raises:
            WorkerFaultError: they are missing, or are not those of this prompt.
        """
        if self._count is None:
            return
        got = first.prompt_logprobs
        num_scored, num_top = len(got.logprobs), len(got.top_logprobs)
        if (
            not first.HasField("prompt_logprobs")
            or num_scored != self._num_prompt_tokens - 1
            or num_top != len(got.top_token_ids)
            or (num_top % num_scored if num_scored else num_top)
            or num_top > num_scored * self._count
        ):
            raise WorkerFaultError(
                f"a worker told {num_scored} prompt logprobs and {num_top} of the most likely of a "
                f"prompt of {self._num_prompt_tokens} tokens"
            )
        self._count, self._waiting = None, got

    async def put_on(self, response: generation_pb2.GenerateResponse) -> None:
        """To be called with the first message to the client, which takes them along."""
        if self._waiting is None:
            return
        got, self._waiting = self._waiting, None
        if len(got.logprobs) + len(got.top_logprobs) < MANY_NUMBERS:
            entries = _entries(got)
        else:
            entries = await asyncio.to_thread(_entries, got)
        response.prompt_logprobs.extend(entries)


def _entries(got: worker_pb2.PromptLogprobs) -> list[common_pb2.TokenLogprobs]:
    """One for each token of the prompt."""
    entries = [common_pb2.TokenLogprobs()]
    count = len(got.top_logprobs) // len(got.logprobs) if got.logprobs else 0
    top = [
        common_pb2.TopLogprob(token_id=token_id, logprob=logprob)
        for token_id, logprob in zip(got.top_token_ids, got.top_logprobs, strict=True)
    ]
    for place, logprob in enumerate(got.logprobs):
        best = top[place * count : (place + 1) * count]
        entries.append(common_pb2.TokenLogprobs(logprob=logprob, top=best))
    return entries
