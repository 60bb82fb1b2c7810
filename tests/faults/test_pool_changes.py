"""Pools grow, shrink, are restarted worker by worker, and lose workers that die or hang: under load
none of it costs a token, and what is lost is noticed in time.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from kill_rig import kill_rig, logged_service
from tiny_models import make_llama_folder
from workload import mixed, pump, run_all

from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from kill_rig import KillRig
    from served import Served
    from workload import Pump

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

AT_ONCE = 16
DEATH_BOUND_S, HANG_BOUND_S = 0.5, 3.0
SERVES_BOUND_S = 2.0  # from ready to the first request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with logged_service(model, folder, prefill=1, decode=1) as served_and_log:
        yield served_and_log


@asynccontextmanager
async def under_load(
    service: tuple[Served, Path], model: Path, name: str, size: int
) -> AsyncIterator[tuple[KillRig, Pump]]:
    """Both pools of that size and a load on them; at the end nothing of it may be wrong."""
    text = ModelText.load(model)
    requests = mixed(48, seed=8, longest_prompt=300, longest_answer=150)
    async with kill_rig(*service) as rig:
        await rig.client.scale({"prefill": size, "decode": size})
        await rig.until_ready(size, size)
        for request in requests:
            request.request_id = f"{name}-{request.request_id}"
        before = await run_all(rig.address, requests, at_once=AT_ONCE)
        failed_before = (await rig.client.status()).router.failed
        async with pump(rig.address, requests, name, at_once=AT_ONCE) as it:
            yield rig, it
        wrong = it.wrong({call.request_id: call for call in before}, text.decode)
        wrong += await rig.check_owners(it.calls)
        assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
        assert len(it.calls) > AT_ONCE
        assert (await rig.client.status()).router.failed == failed_before


async def test_one_three_one_and_new_workers_serve_soon(
    service: tuple[Served, Path], model: Path
) -> None:
    async with under_load(service, model, "scale", 1) as (rig, it):
        old = {worker.worker_id for worker in await rig.workers()}
        await rig.client.scale({"prefill": 3, "decode": 3})
        await rig.until_ready(3, 3)
        new = {worker.worker_id for worker in await rig.workers()} - old
        await asyncio.sleep(SERVES_BOUND_S + 0.5)
        num_before = len(it.calls)
        await rig.client.scale({"prefill": 1, "decode": 1})
        await rig.until_ready(1, 1)
    ready = {
        line["worker"]: line["at_s"]
        for line in rig.lines()
        if line.get("worker") in new and line["state"] == "ready"
    }
    serves_s = {
        worker: min(
            (
                line["at_s"] - at_s
                for line in rig.lines()
                if worker in (line.get("prefill"), line.get("decode"))
            ),
            default=float("inf"),
        )
        for worker, at_s in ready.items()
    }
    counts = {
        "calls": len(it.calls),
        "calls_in_the_drain": len(it.calls) - num_before,
        "serves_s": sorted(round(seconds, 3) for seconds in serves_s.values()),
    }
    print(json.dumps(counts))
    assert len(ready) == 4
    assert max(serves_s.values()) <= SERVES_BOUND_S, counts


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
async def test_each_worker_is_told_to_go_in_turn(
    service: tuple[Served, Path], model: Path, order: tuple[str, str]
) -> None:
    async with under_load(service, model, f"rolling-{order[0]}", 2) as (rig, it):
        for role in order:
            for worker in await rig.workers(role):
                rig.strike(worker, signal.SIGTERM)
                await rig.until_gone(worker.worker_id, 60)
                await rig.until_ready(2, 2)
    old = {strike.worker_id for strike in rig.strikes}
    async with kill_rig(*service) as rig:
        left = {worker.worker_id for worker in await rig.workers()}
    print(json.dumps({"order": order, "restarted": len(old), "calls": len(it.calls)}))
    assert len(old) == 4
    assert not old & left


@pytest.mark.parametrize(
    ("number", "bound_s"),
    [(signal.SIGKILL, DEATH_BOUND_S), (signal.SIGSTOP, HANG_BOUND_S)],
    ids=["death", "hang"],
)
async def test_a_worker_that_is_gone_is_noticed_in_time(
    service: tuple[Served, Path], model: Path, number: signal.Signals, bound_s: float
) -> None:
    noticed_s, silence_s = [], []
    async with under_load(service, model, f"detect-{number.name}", 2) as (rig, _):
        for role in ("decode", "prefill", "decode"):
            worker = (await rig.workers(role))[0]
            struck = psutil.Process(worker.pid)
            strike = rig.strike(worker, number)
            try:
                noticed_s.append(await rig.until_lost(strike, 30))
                await rig.until_gone(worker.worker_id, 30)
            finally:
                if number is signal.SIGSTOP and struck.is_running():
                    await asyncio.to_thread(psutil.wait_procs, [struck], timeout=15)
            await rig.until_ready(2, 2)
            silence_s.append(_moved_after(rig, strike.at_s, worker.worker_id))
    counts = {
        "signal": number.name,
        "noticed_s": [round(seconds, 3) for seconds in noticed_s],
        "placed_elsewhere_s": [round(seconds, 3) for seconds in silence_s],
    }
    print(json.dumps(counts))
    # One of three may fall into a pause of a busy machine.
    assert statistics.median(noticed_s) <= bound_s, counts
    assert max(noticed_s) <= bound_s + 1.0, counts


def _moved_after(rig: KillRig, struck_at_s: float, worker_id: str) -> float:
    """Until the first of the requests that were on that worker had a place on another."""
    on_it: set[tuple[str, int]] = set()
    for line in rig.lines():
        if line["event"] != "begun":
            continue
        key = line["request"], line["answer"]
        if line["at_s"] > struck_at_s and key in on_it:
            return float(line["at_s"]) - struck_at_s
        if worker_id in (line["prefill"], line["decode"]):
            on_it.add(key)
        else:
            on_it.discard(key)
    return time.time() - struck_at_s
