"""Pools grow, shrink, are restarted worker by worker, and lose workers that die or hang: under load
none of it costs a token, and what is lost is noticed in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest
from history import check_all
from kill_rig import kill_rig, logged_service
from tiny_models import make_llama_folder
from workload import mixed, pump, run_all

from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from history import CallHistory
    from kill_rig import KillRig
    from served import Served
    from workload import Pump

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FULL = os.environ.get("LEGATO_KILLS") == "full"
AT_ONCE = 16
ORDERS = [("prefill", "decode"), ("decode", "prefill")] if FULL else [("prefill", "decode")]
NUM_TOLD = 2 if FULL else 1  # of each pool
STRUCK = ("decode", "prefill", "decode") if FULL else ("decode", "prefill")
REQUESTS = mixed(48 if FULL else 30, seed=8, longest_prompt=300, longest_answer=150)
# Of 1 → 3 → 1, each about 20 s: 30 last ten minutes.
NUM_CYCLES = int(os.environ.get("LEGATO_POOL_CYCLES", "3" if FULL else "1"))
DEATH_BOUND_S, HANG_BOUND_S = 0.5, 3.0
TWICE_BOUND_S = 3.0  # from the second SIGTERM to the process's end
SERVES_BOUND_S = 2.0  # from ready to the first request


@dataclass(frozen=True)
class Scene:
    """One service for all tests here."""

    served: Served
    log: Path
    text: ModelText
    references: Mapping[str, CallHistory]  # of REQUESTS, while nothing happened

    @asynccontextmanager
    async def under_load(self, name: str, size: int) -> AsyncIterator[tuple[KillRig, Pump]]:
        """Both pools of that size and a load on them; at the end nothing of it may be wrong."""
        async with kill_rig(self.served, self.log) as rig:
            await rig.client.scale({"prefill": size, "decode": size})
            await rig.until_ready(size, size)
            failed_before = (await rig.client.status()).router.failed
            async with pump(rig.address, REQUESTS, name, at_once=AT_ONCE) as it:
                yield rig, it
            wrong = it.wrong(self.references, self.text.decode)
            wrong += await rig.check_owners(it.calls)
            assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
            assert len(it.calls) > AT_ONCE
            assert (await rig.client.status()).router.failed == failed_before


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    model = make_llama_folder(folder / "tiny", max_position_embeddings=2048)
    text = ModelText.load(model)
    with logged_service(model, folder, prefill=1, decode=1) as (served, log):
        calls = asyncio.run(run_all(served.address, REQUESTS, at_once=AT_ONCE))
        assert check_all(calls, {}, text.decode) == []
        yield Scene(served, log, text, {call.request_id: call for call in calls})


async def test_one_three_one_and_new_workers_serve_soon(scene: Scene) -> None:
    new: set[str] = set()
    drains: list[int] = []  # calls that ended in each
    async with scene.under_load("scale", 1) as (rig, it):
        for _ in range(NUM_CYCLES):
            old = {worker.worker_id for worker in await rig.workers()}
            await rig.client.scale({"prefill": 3, "decode": 3})
            await rig.until_ready(3, 3)
            new |= {worker.worker_id for worker in await rig.workers()} - old
            await asyncio.sleep(SERVES_BOUND_S + 0.5)
            num_before = len(it.calls)
            await rig.client.scale({"prefill": 1, "decode": 1})
            await rig.until_ready(1, 1)
            drains.append(len(it.calls) - num_before)
    serves_s = _serve_after(rig, new)
    counts = {
        "calls": len(it.calls),
        "calls_in_the_drains": drains,
        "serves_s": sorted(round(seconds, 3) for seconds in serves_s.values()),
    }
    print(json.dumps(counts))
    assert len(serves_s) == 4 * NUM_CYCLES
    assert max(serves_s.values()) <= SERVES_BOUND_S, counts


def _serve_after(rig: KillRig, workers: set[str]) -> dict[str, float]:
    """Of each that became ready: seconds until a request was placed on it."""
    ready: dict[str, float] = {}
    serves_s: dict[str, float] = {}
    for line in rig.lines():
        if line.get("worker") in workers and line["state"] == "ready":
            ready[line["worker"]] = line["at_s"]
            serves_s[line["worker"]] = float("inf")
        for role in ("prefill", "decode"):
            worker = line.get(role)
            if worker in ready:
                serves_s[worker] = min(serves_s[worker], line["at_s"] - ready[worker])
    return serves_s


@pytest.mark.parametrize("order", ORDERS)
async def test_each_worker_is_told_to_go_in_turn(scene: Scene, order: tuple[str, str]) -> None:
    async with scene.under_load(f"rolling-{order[0]}", 2) as (rig, it):
        for role in order:
            for worker in (await rig.workers(role))[:NUM_TOLD]:
                rig.strike(worker, signal.SIGTERM)
                await rig.until_gone(worker.worker_id, 60)
                await rig.until_ready(2, 2)
    old = {strike.worker_id for strike in rig.strikes}
    async with kill_rig(scene.served, scene.log) as rig:
        left = {worker.worker_id for worker in await rig.workers()}
    print(json.dumps({"order": order, "restarted": len(old), "calls": len(it.calls)}))
    assert len(old) == 2 * NUM_TOLD
    assert not old & left


async def test_a_worker_that_is_told_twice_goes_at_once(scene: Scene) -> None:
    async with scene.under_load("twice", 2) as (rig, _):
        for role in ("decode", "prefill"):
            worker = (await rig.workers(role))[0]
            struck = psutil.Process(worker.pid)
            await rig.until_busy(worker)
            rig.strike(worker, signal.SIGTERM)
            rig.strike(worker, signal.SIGTERM)
            _, alive = await asyncio.to_thread(psutil.wait_procs, [struck], timeout=TWICE_BOUND_S)
            assert not alive, f"the {role} worker still drains"
            await rig.until_gone(worker.worker_id, 30)
            await rig.until_ready(2, 2)


@pytest.mark.parametrize(
    ("number", "bound_s"),
    [(signal.SIGKILL, DEATH_BOUND_S), (signal.SIGSTOP, HANG_BOUND_S)],
    ids=["death", "hang"],
)
async def test_a_worker_that_is_gone_is_noticed_in_time(
    scene: Scene, number: signal.Signals, bound_s: float
) -> None:
    noticed_s, silence_s = [], []
    async with scene.under_load(f"detect-{number.name}", 2) as (rig, _):
        for role in STRUCK:
            worker = (await rig.workers(role))[0]
            struck = psutil.Process(worker.pid)
            await rig.until_busy(worker)
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
        "placed_elsewhere_s": [s if s is None else round(s, 3) for s in silence_s],
    }
    print(json.dumps(counts))
    # One of them may fall into a pause of a busy machine.
    assert statistics.median_low(noticed_s) <= bound_s, counts
    assert max(noticed_s) <= bound_s + 1.0, counts


def _moved_after(rig: KillRig, struck_at_s: float, worker_id: str) -> float | None:
    """Seconds until the first of the requests that were on that worker had a place on another;
    None: all of them had ended when it was struck.
    """
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
    return None
