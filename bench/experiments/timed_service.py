"""TimedService: a router and worker processes under test, and when their tokens came."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc
import numpy as np

from legato.bench.handoff.service import running_service, until_ready
from legato.bench.load.sample import note_tokens
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.protos import common_pb2, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from legato.bench.experiments.lab import LabSettings
    from legato.cluster.control_plane import Role
    from legato.cluster.text.model_text import ModelText

# A service refuses what it believes not to end in time; here everything is to be measured.
_DEADLINE_S = 3600.0
_CALL_TIMEOUT_S = 10.0
# On a busy machine a worker may be late to report; here it is to be waited for, not replaced.
_OPTIONS = RouterOptions(port=0, worker_silence_s=30.0)
_WARM_UP = ((64, 8), (8, 8))  # prompts and answers: pages, connections, kernels


@dataclass(frozen=True)
class AnswerTimes:
    """One whole answer, on this process's clock."""

    sent_s: float
    token_times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        """Until the last token."""
        return self.token_times_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it."""
        return [b - a for a, b in pairwise(self.token_times_s)]


class TimedService:
    """Prompts are random, and never the same: no cache of prefixes may help."""

    def __init__(
        self, stub: generation_pb2_grpc.GenerationAsyncStub, model: generation_pb2.GetModelResponse
    ) -> None:
        self._stub = stub
        self.model = model
        self._random = np.random.default_rng(1)

    async def answer(
        self, prompt_tokens: int, answer_tokens: int, times: list[float] | None = None
    ) -> AnswerTimes:
        """A whole answer of so many tokens. `times`: hears of each token as it comes.

        Raises:
            RuntimeError: it failed, or is not whole.
        """
        ids = self._random.integers(0, self.model.vocab_size, prompt_tokens).tolist()
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=ids),
            sampling=common_pb2.SamplingParams(
                max_tokens=answer_tokens, temperature=0.0, ignore_eos=True
            ),
        )
        times = [] if times is None else times
        sent_s = time.perf_counter()
        try:
            async for response in self._stub.Generate(request, timeout=_DEADLINE_S):
                if response.WhichOneof("event") != "finish":
                    note_tokens(times, time.perf_counter(), len(response.delta.token_ids))
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(f"{error.code().name}: {error.details()}") from None
        if len(times) != answer_tokens:
            raise RuntimeError(f"an answer has {len(times)} of {answer_tokens} tokens")
        return AnswerTimes(sent_s, tuple(times))

    async def answers(
        self, count: int, prompt_tokens: int, answer_tokens: int, at_once: int
    ) -> list[AnswerTimes]:
        """So many alike, at most `at_once` under way. Raises RuntimeError."""
        places = asyncio.Semaphore(at_once)

        async def one() -> AnswerTimes:
            async with places:
                return await self.answer(prompt_tokens, answer_tokens)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
        return [task.result() for task in tasks]


@asynccontextmanager
async def timed_service(
    settings: LabSettings,
    text: ModelText,
    roles: Sequence[Role],
    num_threads: int,
    *arguments: str,
) -> AsyncIterator[TimedService]:
    """Starts it, and warms it up. `num_threads`: of each worker; `arguments`: more of them.

    Raises:
        RuntimeError: a worker did not start, or a request failed.
        TimeoutError: the service did not get ready.
    """
    of_workers = ["--device", settings.device, "--dtype", settings.dtype]
    of_workers += ["--threads", str(num_threads), *arguments]
    async with (
        running_service(settings.model, text, of_workers, _OPTIONS, roles) as address,
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        await until_ready(channel)
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
        model = await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_CALL_TIMEOUT_S)
        service = TimedService(stub, model)
        for prompt_tokens, answer_tokens in _WARM_UP:
            await service.answers(2 * len(roles), prompt_tokens, answer_tokens, 2 * len(roles))
        yield service
