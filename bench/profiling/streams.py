"""ProfiledService: single requests and steady batches on an idle service, and what they took."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc
import numpy as np

from legato.bench.load.sample import note_tokens
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from legato.protos import generation_pb2_grpc

TIMEOUT_S = 300.0
# Of a batch's streams, which are cancelled when they were measured: a service refuses what it
# believes not to end in time, and most of their tokens will never be asked for.
_BATCH_DEADLINE_S = 86_400.0
_JOINED_TOKENS = 3  # of each stream, before gaps count: then all are in the batch


class StreamEndedError(Exception):
    """One stream of a batch had all its tokens before the others had enough."""


@dataclass(frozen=True)
class PromptTime:
    """One request that decodes nothing; seconds."""

    num_tokens: int  # computed
    cached_tokens: int
    model_s: float
    ttft_s: float


@dataclass(frozen=True)
class BatchTime:
    """Of streams that all decode; seconds."""

    mean_rows: float  # of KV, of each
    gaps_s: list[float]  # of all of them

    @property
    def step_s(self) -> float:
        """The median gap."""
        return statistics.median(self.gaps_s)


class ProfiledService:
    """Prompts are random, and never the same."""

    def __init__(
        self, stub: generation_pb2_grpc.GenerationAsyncStub, model: generation_pb2.GetModelResponse
    ) -> None:
        self._stub = stub
        self.model = model
        self._random = np.random.default_rng(1)

    def prompt(self, num_tokens: int) -> list[int]:
        """Of any ids: the model is not read, it is timed."""
        ids: list[int] = self._random.integers(0, self.model.vocab_size, num_tokens).tolist()
        return ids

    async def time_prompt(self, prompt: list[int]) -> PromptTime:
        """Computes it, and no more.

        Raises:
            grpc.RpcError: the service does not.
        """
        sent_s, first_s = time.perf_counter(), 0.0
        finish: generation_pb2.Finish | None = None
        async for response in self._stub.Generate(_request(prompt, 1), timeout=TIMEOUT_S):
            if response.WhichOneof("event") == "finish":
                finish = response.finish
            else:
                first_s = time.perf_counter()
        assert finish is not None, "the stream ended without an error"
        cached = finish.usage.cached_prompt_tokens
        return PromptTime(
            len(prompt) - cached, cached, finish.timings.prefill_model_s, first_s - sent_s
        )

    async def time_first_gap(self, num_tokens: int, num_more: int) -> float:
        """What the gap between the first two tokens is beyond the median of those behind."""
        times: list[float] = []
        request = _request(self.prompt(num_tokens), num_more + 2)
        async for response in self._stub.Generate(request, timeout=TIMEOUT_S):
            if response.WhichOneof("event") != "finish":
                note_tokens(times, time.perf_counter(), len(response.delta.token_ids))
        step_s = statistics.median(b - a for a, b in pairwise(times[1:]))
        return max(0.0, times[1] - times[0] - step_s)

    @asynccontextmanager
    async def batch(
        self, num_sequences: int, context_tokens: int, max_tokens: int
    ) -> AsyncIterator[Batch]:
        """So many streams; within the block all decode, until one has its `max_tokens`.

        Raises:
            StreamEndedError: it had them before all decoded.
            grpc.RpcError: one failed.
        """
        batch = Batch(num_sequences, context_tokens)
        prompts = [self.prompt(context_tokens) for _ in range(num_sequences)]
        tasks = [
            asyncio.create_task(
                batch.read(self._stub.Generate(request, timeout=_BATCH_DEADLINE_S), number)
            )
            for number, request in enumerate(_request(p, max_tokens) for p in prompts)
        ]
        try:
            await batch.until_all_have(_JOINED_TOKENS)
            yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Batch:
    """Streams that are read as they come."""

    def __init__(self, num_sequences: int, context_tokens: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num_sequences)]
        self._context_tokens = context_tokens
        self._changed = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        self._ended = False

    async def read(self, call: AsyncIterable[generation_pb2.GenerateResponse], number: int) -> None:
        """One of them, to its end."""
        try:
            async for response in call:
                if response.WhichOneof("event") != "finish":
                    count = len(response.delta.token_ids)
                    note_tokens(self._times[number], time.perf_counter(), count)
                    self._changed.set()
            self._ended = True
        except grpc.aio.AioRpcError as error:  # for whoever waits for tokens
            self._error = error
        finally:
            self._changed.set()

    async def until_all_have(self, num_tokens: int) -> None:
        """Raises StreamEndedError where one ended before, grpc.RpcError where one failed."""
        async with asyncio.timeout(TIMEOUT_S):
            while min(map(len, self._times)) < num_tokens:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise StreamEndedError
                self._changed.clear()
                await self._changed.wait()

    async def measure(self, num_tokens: int) -> BatchTime:
        """The gaps until each stream has so many tokens more.

        Raises:
            StreamEndedError: one ended before.
            grpc.RpcError: one failed.
        """
        begun = [len(times) for times in self._times]
        await self.until_all_have(max(begun) + num_tokens)
        gaps, rows = [], []
        for times, first in zip(self._times, begun, strict=True):
            gaps += [b - a for a, b in pairwise(times[first - 1 :])]
            rows.append(self._context_tokens + (first + len(times)) / 2)
        return BatchTime(statistics.mean(rows), gaps)


def _request(prompt: list[int], max_tokens: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
