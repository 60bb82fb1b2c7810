"""The cancel table with real processes: whoever has a request's ticket, or its prompt, is stopped,
goes on later, and is killed.
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

from legato.cluster import attempt
from legato.cluster.worker_calls import PrefillCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from local_service import Answer
    from transformers import PreTrainedModel

    from legato.protos import worker_pb2

pytestmark = pytest.mark.integration

PROMPT = list(b"who holds what, and for how long?")
NUM_TOKENS = 24
LONG = 3500  # tokens of each prompt that is before it
NUM_AHEAD = 6
BOUND_S = 5.0 + 5.0  # a dead peer's leases end within 5 s; the rest is a busy machine's


class NotedCall(PrefillCall):
    """Tells when a prompt has gone to its prefill worker: by then it has its ticket."""

    begun: dict[str, str] = {}  # noqa: RUF012  # shared; the worker, by request

    async def begin(self, request: worker_pb2.PrefillRequest) -> None:
        await super().begin(request)
        self.begun.setdefault(request.key.request_id, self.view.worker_id)


async def lose_one(
    service: LocalService, oracle: PreTrainedModel, role: str, number: signal.Signals
) -> None:
    """Sends the signal while the prompt waits behind long ones; the answer is exact, in time."""
    request_id = f"{role} {number.name}"
    salt = list(request_id.encode())
    ahead = [
        asyncio.create_task(ask(service, [*salt, i] * (LONG // (len(salt) + 1)), 1))
        for i in range(NUM_AHEAD)
    ]
    await until(lambda: service.router.num_in_flight == NUM_AHEAD)
    prompt = [*salt, *PROMPT]
    asking = asyncio.create_task(ask(service, prompt, NUM_TOKENS, request_id))
    await until(lambda: request_id in NotedCall.begun)
    has_ticket = [v.worker_id for v in service.router.pool.views() if v.calls]
    taken = {worker.worker_id: worker for worker in service.workers}
    if role == "prefill":
        victim = taken[NotedCall.begun[request_id]]
    else:
        [victim] = [taken[w] for w in has_ticket if taken[w].role == "decode"]
    os.kill(victim.pid, number)
    struck_at_s = time.monotonic()
    answer = await asking
    took_s = time.monotonic() - struck_at_s
    assert answer.token_ids == greedy(oracle, prompt, NUM_TOKENS)
    timings = answer.done.timings
    # Retargeted: it had not begun to decode. Of a lost prompt nothing had been told.
    assert (timings.attempts, timings.retargets) == (2, role == "decode")
    assert timings.prefill_forwards == 1
    for task in ahead:
        assert len((await task).token_ids) == 1
    print(f"{role} worker, {number.name}: the answer's end after {took_s:.2f} s")
    assert took_s < BOUND_S

    # Stopped: what was sent to it, and by it, comes late. Nobody is harmed, and it frees all.
    if number is signal.SIGSTOP:
        os.kill(victim.pid, signal.SIGCONT)
    else:
        service.workers.remove(victim)
        await asyncio.to_thread(victim.kill)
        await service.publish()
    await service.wait_idle(BOUND_S)
    await until(lambda: all(view.placeable for view in service.router.pool.views()))
    assert (await ask(service, PROMPT, 8)).token_ids == greedy(oracle, PROMPT, 8)


async def ask(
    service: LocalService, prompt: list[int], num_tokens: int, request_id: str = ""
) -> Answer:
    asked = request(prompt, request_id=request_id, max_tokens=num_tokens, ignore_eos=True)
    return await collect(service.generation.Generate(asked, timeout=60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the router's books set no event
            await asyncio.sleep(0.001)


async def test_workers_that_are_stopped_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "PrefillCall", NotedCall)
    folder = make_llama_folder(tmp_path / "tiny", max_position_embeddings=4096)
    oracle = load_oracle(folder)
    async with LocalService(folder, prefill=2, decode=2) as service:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for role in ("decode", "prefill"):
                await lose_one(service, oracle, role, number)
