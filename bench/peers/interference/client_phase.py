"""run_phase: a phase of interference against a service, as its clients see it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from legato.bench.peers.interference.workload import PhaseRecord

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from legato.bench.peers.interference.workload import Deliveries, PhasePlan

    # Of a prompt and a number of tokens: how many came with each message.
    Send = Callable[[list[int], int], AsyncGenerator[int, None]]

_CANCEL_TIMEOUT_S = 10.0
_POLL_S = 0.02


async def run_phase(send: Send, plan: PhasePlan) -> PhaseRecord:
    """Sends streams and prompts when they are due, whatever became of those before.

    Raises:
        ValueError: a stream ended, or a prompt was refused: as `send` says.
        TimeoutError: what was cut off in the end does not end.
    """
    record = PhaseRecord.empty(plan)
    began_s = time.perf_counter()
    tasks = [
        asyncio.create_task(_stream(send, plan, prompt, deliveries, began_s))
        for prompt, deliveries in zip(plan.streams, record.streams, strict=True)
    ]
    try:
        await _until(began_s + plan.begin_timeout_s, tasks, record.streams)
        if all(stream.times_s for stream in record.streams):
            record.begin_s = max(s.times_s[0] for s in record.streams) + plan.settle_s
            window_s = began_s + record.begin_s
            tasks += [
                asyncio.create_task(_prompt(send, plan, prompt, deliveries, began_s, at_s))
                for prompt, deliveries, at_s in zip(
                    plan.prompts, record.prompts, (window_s + due for due in plan.dues_s),
                    strict=True,
                )
            ]  # fmt: skip
            await _until(window_s + plan.window_s, tasks)
            await _until(time.perf_counter() + plan.drain_s, tasks, record.prompts)
        record.ended_s = time.perf_counter() - began_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
    if any(not task.done() for task in tasks):
        raise TimeoutError(f"a request was not cancelled within {_CANCEL_TIMEOUT_S:g} s")
    return record


async def _until(
    at_s: float, tasks: list[asyncio.Task[None]], begun: list[Deliveries] | None = None
) -> None:
    """Or until all of `begun` have a token. Raises what a task failed with, at once."""
    while (left_s := at_s - time.perf_counter()) > 0:
        if begun is not None and all(one.times_s for one in begun):
            return
        pause_s = left_s if begun is None else min(left_s, _POLL_S)
        running = [task for task in tasks if not task.done()]
        await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()


async def _stream(
    send: Send, plan: PhasePlan, prompt: list[int], deliveries: Deliveries, began_s: float
) -> None:
    await _read(send, prompt, plan.stream_answer_tokens, deliveries, began_s)
    raise ValueError(f"a stream ended after {sum(deliveries.counts)} tokens")


async def _prompt(
    send: Send,
    plan: PhasePlan,
    prompt: list[int],
    deliveries: Deliveries,
    began_s: float,
    at_s: float,
) -> None:
    await asyncio.sleep(at_s - time.perf_counter())
    await _read(send, prompt, plan.answer_tokens, deliveries, began_s)
    if sum(deliveries.counts) != plan.answer_tokens:
        raise ValueError(
            f"a prompt's answer has {sum(deliveries.counts)} of {plan.answer_tokens} tokens"
        )


async def _read(
    send: Send, prompt: list[int], max_tokens: int, deliveries: Deliveries, began_s: float
) -> None:
    async with aclosing(send(prompt, max_tokens)) as messages:
        async for count in messages:
            deliveries.note(time.perf_counter() - began_s, count)
