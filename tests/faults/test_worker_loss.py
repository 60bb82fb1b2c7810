"""Worker processes are killed or stopped under load: nothing is lost, doubled, wrong or leaked."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from local_service import LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions

if TYPE_CHECKING:
    from pathlib import Path

    from local_service import LocalWorker
    from transformers import PreTrainedModel

pytestmark = pytest.mark.integration

NUM_STREAMS = int(os.environ.get("LEGATO_FAULT_STREAMS", "12"))
NUM_TOKENS = 240
REPEATS = {"decode": 1, "prefill": 6}  # of a prompt: longer ones keep a prefill worker busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


@functools.cache  # the same prompts with each fault
def expected(oracle: PreTrainedModel, prompt: bytes) -> list[int]:
    return greedy(oracle, list(prompt), NUM_TOKENS)


async def at_work(service: LocalService, role: str) -> LocalWorker:
    """The first worker of the role that is seen with sequences in its hands."""
    async with asyncio.timeout(30):
        while True:
            loads = [load for _, load in await service.loads()]
            for worker, load in zip(service.workers, loads, strict=True):
                if worker.role == role and load.running + load.waiting + load.transferring > 0:
                    return worker


async def streams_survive(
    service: LocalService, oracle: PreTrainedModel, fault: signal.Signals, victim_role: str
) -> None:
    """Starts streams, sends `fault` to one worker of the role, checks every answer."""
    repeats = REPEATS[victim_role]
    prompts = [list(f"fault {i} ".encode()) * (1 + i % 5) * repeats for i in range(NUM_STREAMS)]
    tasks = [
        asyncio.create_task(
            collect(
                service.generation.Generate(
                    request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True), timeout=60
                )
            )
        )
        for prompt in prompts
    ]
    victim = await at_work(service, victim_role)
    os.kill(victim.pid, fault)
    struck_at = time.monotonic()
    # The canary goes elsewhere as soon as the loss is noticed.
    canary = await collect(
        service.generation.Generate(
            request(list(b"hello"), max_tokens=8, ignore_eos=True), timeout=30
        )
    )
    assert time.monotonic() - struck_at < 15
    assert canary.token_ids == greedy(oracle, list(b"hello"), 8)
    answers = await asyncio.gather(*tasks)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(oracle, bytes(prompt))
    moved = sum(answer.done.timings.attempts > 1 for answer in answers)
    assert moved > 0, "the fault hit no stream: this run proves nothing"
    await asyncio.to_thread(victim.kill)
    service.workers.remove(victim)
    await service.publish()
    await service.wait_idle()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_streams_survive_the_loss_of_a_worker(
    folder: Path, oracle: PreTrainedModel, fault: signal.Signals, role: str
) -> None:
    async with LocalService(folder, prefill=2, decode=2) as service:
        await streams_survive(service, oracle, fault, role)


async def test_the_last_decode_worker_lost_ends_requests_in_time(tmp_path: Path) -> None:
    longer = make_llama_folder(tmp_path / "longer", max_position_embeddings=4096)
    async with LocalService(longer, options=RouterOptions(port=0)) as service:
        call = service.generation.Generate(
            request("last of its kind", max_tokens=4000, ignore_eos=True), timeout=6
        )
        await anext(aiter(call))
        victim = next(worker for worker in service.workers if worker.role == "decode")
        started = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call)
        assert error.value.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        assert time.monotonic() - started < 8
        assert not (await service.status()).ready
