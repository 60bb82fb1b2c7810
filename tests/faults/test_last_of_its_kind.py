"""The only worker of a pool dies: requests wait for another as long as their deadlines allow."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import TYPE_CHECKING

import pytest
from history import check_all
from kill_rig import kill_rig, logged_service
from owners import Ledger, hits_of
from tiny_models import make_llama_folder
from workload import mixed, record, run_all

from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from pathlib import Path

    from history import CallHistory
    from kill_rig import KillRig
    from owners import Strike

    from legato.protos import cluster_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_REQUESTS = 100
NUM_TOLD = 60  # in one go, of whom the router must think that it can answer them in time
AT_ONCE = 24
MOST_STRIKES = 4  # of the decode worker, until one hits a stream
# Answers in a worker's own phase when it is struck: prompts are there for moments only.
BUSY = {"prefill": 1, "decode": 6}
DEADLINES_S = (5.0, 6.0, 7.0, 8.0)  # where nobody comes back


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=2048)


async def once_busy(rig: KillRig, role: str) -> cluster_pb2.WorkerStatus:
    """The only worker of the role, when enough is under way on it."""
    (worker,) = await rig.workers(role)
    async with asyncio.timeout(30):
        while True:
            ledger = Ledger()
            for line in rig.lines():
                ledger.take(line)
            if ledger.hits(role, worker.worker_id).get(role, 0) >= BUSY[role]:
                return worker
            await asyncio.sleep(0.01)


async def test_the_only_worker_of_each_pool_dies_and_nobody_fails(
    model: Path, tmp_path: Path
) -> None:
    text = ModelText.load(model)
    requests = mixed(NUM_REQUESTS, seed=5, longest_prompt=400, longest_answer=150)
    with logged_service(model, tmp_path, prefill=1, decode=1) as (served, log):
        async with kill_rig(served, log) as rig:
            before = await run_all(rig.address, requests, at_once=AT_ONCE)
            references = {f"again {call.request_id}": call for call in before}
            for request in requests:
                request.request_id = f"again {request.request_id}"
            running = asyncio.create_task(
                run_all(rig.address, requests, at_once=AT_ONCE, timeout_s=120)
            )
            back_s = []
            for role in ("decode", "prefill"):
                for _ in range(MOST_STRIKES):
                    victim = await once_busy(rig, role)
                    strike = rig.strike(victim, signal.SIGKILL)
                    await rig.until_gone(victim.worker_id, 10)
                    assert not running.done(), "all was over before the kill"
                    await rig.until_ready(1, 1)
                    back_s.append(round(time.time() - strike.at_s, 2))
                    # Where this process was kept from its work, what it saw was over by then.
                    if role != "decode" or hits_of(rig.lines(), rig.strikes)["decode/decode"]:
                        break
            calls = await running
            wrong = check_all(before, {}, text.decode) + check_all(calls, references, text.decode)
            wrong += await rig.check_owners(calls)
            hits = hits_of(rig.lines(), rig.strikes)
    failed = sum(bool(call.error) for call in calls)
    last = {strike.role: strike for strike in rig.strikes}
    waited = [num_waiting(rig, strike) for strike in last.values()]
    counts = {
        "requests": len(calls),
        "failed": failed,
        "hits": dict(hits),
        "back_s": back_s,
        "waited": waited,
    }
    print(json.dumps(counts))
    assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
    assert hits["decode/decode"] > 0, f"the kill hit no stream: {counts}"
    assert min(waited) > 0, f"nobody wanted the worker that was gone: {counts}"


def num_waiting(rig: KillRig, strike: Strike) -> int:
    """Answers that waited in the router when the pool had a worker again."""
    ledger = Ledger()
    for line in rig.lines():
        is_new = line.get("worker", "").startswith(strike.role) and line["state"] == "ready"
        if is_new and line["at_s"] > strike.at_s:
            return ledger.num_queued()
        ledger.take(line)
    raise AssertionError(f"no {strike.role} worker came back")


async def ask_all(rig: KillRig, name: str) -> list[tuple[float, CallHistory]]:
    """Requests all at once, with deadlines that also a busy machine could meet: the router refuses
    at once what cannot be answered in time.
    """
    requests = mixed(NUM_TOLD, seed=6, longest_prompt=40, longest_answer=120)

    async def one(number: int) -> tuple[float, CallHistory]:
        deadline_s = DEADLINES_S[number % len(DEADLINES_S)]
        request = requests[number]
        request.request_id = f"{name} {request.request_id}"
        return deadline_s, await record(rig.client, request, timeout_s=deadline_s)

    return await asyncio.gather(*(one(number) for number in range(NUM_TOLD)))


def check_told_in_time(ended: list[tuple[float, CallHistory]], role: str) -> dict[str, float]:
    """Each is told that there is no worker, in the last second before its deadline."""
    left_s = [deadline - (call.ended_at_s - call.asked_at_s) for deadline, call in ended]
    for _, call in ended:
        assert call.error.startswith("UNAVAILABLE"), call.error
        assert f"{role} pool has had no ready worker" in call.error
    counts = {"requests": len(ended), "earliest_s": max(left_s), "latest_s": min(left_s)}
    print(json.dumps({"role": role, **counts}))
    assert 0 < min(left_s) <= max(left_s) <= 1.0
    return counts


async def test_where_nobody_comes_back_each_is_told_just_before_its_deadline(
    model: Path, tmp_path: Path
) -> None:
    with logged_service(model, tmp_path, "--no-restart", prefill=1, decode=1) as (served, log):
        async with kill_rig(served, log) as rig:
            asking = asyncio.create_task(ask_all(rig, "decode"))
            victim = await once_busy(rig, "decode")
            rig.strike(victim, signal.SIGKILL)
            ended = await asking
            hits = hits_of(rig.lines(), rig.strikes)
            assert hits["decode/decode"] > 0, f"the kill hit no stream: {hits}"
            check_told_in_time([pair for pair in ended if pair[1].error], "decode")
            assert sum(bool(call.error) for _, call in ended) > 0.7 * NUM_TOLD
            (_, pool) = (await rig.client.status()).pools
            assert "1 lost and not replaced" in pool.message
            # An operator brings it back.
            await rig.client.scale({"decode": 1})
            await rig.until_ready(1, 1)
            (victim,) = await rig.workers("prefill")
            rig.strike(victim, signal.SIGKILL)
            await rig.until_gone(victim.worker_id, 10)
            check_told_in_time(await ask_all(rig, "prefill"), "prefill")
            assert await rig.check_owners([]) == []
