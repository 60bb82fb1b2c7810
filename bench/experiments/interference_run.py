"""InterferenceRun: streams that decode while long prompts arrive, on several arrangements."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from legato.bench.experiments.timed_service import timed_service
from legato.bench.workload import percentile
from legato.cluster.text.model_text import ModelText
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.experiments.lab import LabSettings
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.bench.experiments.timed_service import TimedService
    from legato.cluster.control_plane import Role

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 16
PERIOD_S = 2.0
MAX_ROUNDS = 5
TURN_TIMEOUT_S = 180.0
MIX_TOKENS, MIX_ANSWER_TOKENS, MIX_AT_ONCE = 256, 64, 8


@dataclass(frozen=True)
class Arrangement:
    """The same cores, divided among workers."""

    name: str
    roles: tuple[Role, ...]
    cores_each: int


@dataclass(frozen=True)
class Sizes:
    """Of one turn, by the time that there is."""

    quiet_s: float
    num_prompts: int
    num_mixed: int

    @classmethod
    def within(cls, seconds: float) -> Sizes:
        """A turn of each arrangement is to take about a third of this, and less where it can."""
        turn_s = seconds / 6
        return cls(
            quiet_s=min(4.0, max(1.0, turn_s / 6)),
            num_prompts=int(min(5, max(2, turn_s // 5))),
            num_mixed=int(min(16, max(MIX_AT_ONCE, turn_s // 2))),
        )


@dataclass(frozen=True)
class Turn:
    """One arrangement in one round."""

    quiet_p99_s: float  # gaps of the streams while nothing arrives
    busy_p99_s: float  # while long prompts arrive
    busy_worst_s: float
    prompt_ttft_s: float  # the median of the long prompts
    tokens_per_s: float  # of another load, for throughput: answers' tokens over all its time


class InterferenceRun:
    """Services of all arrangements stay up and take turns, the others idle."""

    def __init__(
        self, settings: LabSettings, long_tokens: int, stream_tokens: int, sizes: Sizes
    ) -> None:
        self._settings = settings
        self.long_tokens, self._stream_tokens, self.sizes = long_tokens, stream_tokens, sizes

    async def measure(
        self, arrangements: Sequence[Arrangement], budget: TimeBudget
    ) -> dict[Arrangement, list[Turn]]:
        """Starting the workers takes none of the time.

        Raises:
            RuntimeError: a worker did not start, or a request failed; alone or in a group.
            TimeoutError: a turn took too long.
        """
        text = ModelText.load(resolve_model(self._settings.model))
        turns: dict[Arrangement, list[Turn]] = {one: [] for one in arrangements}
        async with AsyncExitStack() as stack:
            with budget.apart():
                services = {
                    one: await stack.enter_async_context(
                        timed_service(self._settings, text, one.roles, one.cores_each)
                    )
                    for one in arrangements
                }
            for _ in budget.rounds(MAX_ROUNDS):
                for one, service in services.items():
                    async with asyncio.timeout(TURN_TIMEOUT_S):
                        turns[one].append(await self._turn(service))
        return turns

    async def _turn(self, service: TimedService) -> Turn:
        lanes: list[list[list[float]]] = [[] for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(self._stream(service, lane)) for lane in lanes]
        try:
            await _until_all_stream(lanes, streams)
            begun_s = time.perf_counter()
            await asyncio.sleep(self.sizes.quiet_s)
            quiet_until_s = time.perf_counter()
            ttfts = await self._prompts(service)
            busy_until_s = time.perf_counter()
            for task in streams:
                if task.done():
                    task.result()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        quiet = _gaps(lanes, begun_s, quiet_until_s)
        busy = _gaps(lanes, quiet_until_s, busy_until_s)
        if not quiet or not busy:
            raise RuntimeError("the streams had no tokens while they were watched")
        mixed_s = time.perf_counter()
        answers = await service.answers(
            self.sizes.num_mixed, MIX_TOKENS, MIX_ANSWER_TOKENS, MIX_AT_ONCE
        )
        mixed_s = time.perf_counter() - mixed_s
        return Turn(
            percentile(quiet, 99),
            percentile(busy, 99),
            max(busy),
            statistics.median(ttfts),
            sum(len(answer.token_times_s) for answer in answers) / mixed_s,
        )

    async def _stream(self, service: TimedService, answers: list[list[float]]) -> None:
        """One answer after the other, until it is cancelled."""
        while True:
            answers.append([])
            await service.answer(STREAM_PROMPT_TOKENS, self._stream_tokens, answers[-1])

    async def _prompts(self, service: TimedService) -> list[float]:
        """Long ones, one a period, whatever became of those before; their TTFT."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(self.sizes.num_prompts):
                tasks.append(group.create_task(service.answer(self.long_tokens, 1)))
                await asyncio.sleep(PERIOD_S)
        return [task.result().ttft_s for task in tasks]


async def _until_all_stream(
    lanes: list[list[list[float]]], streams: list[asyncio.Task[None]]
) -> None:
    """Until each has some tokens. Raises RuntimeError where one failed."""
    while not all(lane and len(lane[0]) >= 3 for lane in lanes):
        for task in streams:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


def _gaps(lanes: list[list[list[float]]], begun_s: float, until_s: float) -> list[float]:
    """Those that ended in between, within an answer."""
    return [
        b - a
        for lane in lanes
        for times in lane
        for a, b in pairwise(times)
        if begun_s < b <= until_s
    ]
