"""The cancel table with real processes: a worker that holds a request's ticket or prompt is stopped,
goes on much later, and is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from local_service import LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from local_service import Answer, LocalWorker
    from transformers import PreTrainedModel

pytestmark = pytest.mark.integration

PROMPT = list(b"who holds what, and for how long?")
NUM_TOKENS = 24
LONG = 3500  # tokens of each prompt that is before it
NUM_AHEAD = 6
BOUND_S = 5.0 + 5.0  # a dead peer's leases end within 5 s; the rest is a busy machine's


async def lose_one(
    service: LocalService, oracle: PreTrainedModel, role: str, number: signal.Signals
) -> LocalWorker:
    """Sends the signal to the worker of the role that has the ticket, or the prompt, of a request
    that waits behind long ones; its answer is exact and in time.
    """
    salt = list(f"{role} {number.name} ".encode())
    ahead = [
        asyncio.create_task(ask(service, [*salt, i] * (LONG // (len(salt) + 1)), 1))
        for i in range(NUM_AHEAD)
    ]
    views = {view.worker_id: view for view in service.router.pool.views()}

    def calls(role: str) -> dict[str, int]:
        return {
            w.worker_id: len(views[w.worker_id].calls) for w in service.workers if w.role == role
        }

    await until(lambda: sum(calls("prefill").values()) == NUM_AHEAD)
    before = calls("prefill") | calls("decode")
    prompt = [*salt, *PROMPT]
    asking = asyncio.create_task(ask(service, prompt, NUM_TOKENS))
    await until(lambda: sum(calls("prefill").values()) == NUM_AHEAD + 1)
    [taken] = [w for w, n in calls(role).items() if n > before[w]]
    [victim] = [worker for worker in service.workers if worker.worker_id == taken]
    os.kill(victim.pid, number)
    struck_at_s = time.monotonic()
    # The long ones are before it, so that neither its prompt nor its hand-off had begun.
    assert sum(calls("prefill").values()) == NUM_AHEAD + 1

    answer = await asking
    took_s = time.monotonic() - struck_at_s
    assert answer.token_ids == greedy(oracle, prompt, NUM_TOKENS)
    timings = answer.done.timings
    assert (timings.attempts, timings.retargets) == (2, role == "decode")
    for task in ahead:
        assert len((await task).token_ids) == 1
    print(f"{role} worker, {number.name}: the answer's end after {took_s:.2f} s")
    assert took_s < BOUND_S
    return victim


async def ask(service: LocalService, prompt: list[int], num_tokens: int) -> Answer:
    asked = request(prompt, max_tokens=num_tokens, ignore_eos=True)
    return await collect(service.generation.Generate(asked, timeout=60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the router's books set no event
            await asyncio.sleep(0.001)


async def test_workers_that_are_stopped_and_killed(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny", max_position_embeddings=4096)
    oracle = load_oracle(folder)
    async with LocalService(folder, prefill=2, decode=2) as service:
        for role in ("decode", "prefill"):
            victim = await lose_one(service, oracle, role, signal.SIGSTOP)
            # What was sent to it, and by it, comes late: nobody is harmed, and it frees all.
            os.kill(victim.pid, signal.SIGCONT)
            await service.wait_idle()
            await until(lambda: all(v.placeable for v in service.router.pool.views()))
            assert (await ask(service, PROMPT, 8)).token_ids == greedy(oracle, PROMPT, 8)
        for role in ("decode", "prefill"):
            victim = await lose_one(service, oracle, role, signal.SIGKILL)
            service.workers.remove(victim)
            await asyncio.to_thread(victim.kill)
            await service.publish()
            await service.wait_idle(BOUND_S)
            assert (await ask(service, PROMPT, 8)).token_ids == greedy(oracle, PROMPT, 8)
