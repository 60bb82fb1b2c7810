"""Requests that nobody should send, by the hundred thousand, against real workers.

At full size: `make fuzz`.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import psutil
import pytest
from http_fuzz import fuzz_http
from local_service import LocalService, collect, request
from request_fuzz import fuzz
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions

if TYPE_CHECKING:
    from pathlib import Path

    from local_service import Answer

pytestmark = pytest.mark.integration

FULL = os.environ.get("LEGATO_FUZZ") == "full"
NUM_REQUESTS = int(os.environ.get("LEGATO_FUZZ_REQUESTS", "70000" if FULL else "600"))
NUM_HTTP = int(os.environ.get("LEGATO_FUZZ_HTTP_REQUESTS", "30000" if FULL else "200"))
SEED = int(os.environ.get("LEGATO_FUZZ_SEED", "1"))
GROWTH, SLACK_BYTES = 0.1, 32 << 20  # of memory, between a quarter of the run and its end


def private_bytes(pid: int) -> int:
    """Of a process; what it shares, such as libraries, grows with what happens to be read."""
    memory = psutil.Process(pid).memory_full_info()
    return int(memory.uss + memory.swap)


async def canary(service: LocalService) -> Answer:
    return await collect(
        service.generation.Generate(
            request("the canary", max_tokens=16, ignore_eos=True), timeout=20
        )
    )


@pytest.mark.timeout(3600 if FULL else 300)
async def test_nothing_crashes_sticks_leaks_or_goes_unexplained(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    options = RouterOptions(port=0, http_port=0, local_prefill_tokens=0)
    args = ("--kv-memory", "16MiB")
    async with LocalService(folder, worker_args=args, options=options) as service:
        before = await canary(service)
        pids = {"router": os.getpid(), **{w.worker_id: w.pid for w in service.workers}}
        at_quarter: dict[str, int] = {}

        def after(num_done: int, num_in_all: int) -> None:
            if num_done == num_in_all // 4:
                gc.collect()
                at_quarter.update({name: private_bytes(pid) for name, pid in pids.items()})
            if FULL and num_done % 10_000 == 0:
                print(num_done, f"{private_bytes(os.getpid()) >> 20} MiB", flush=True)

        async def check_memory(kind: str) -> None:
            """Each kind has a quarter of its own: the first of a kind load what they need."""
            await service.wait_idle()
            gc.collect()
            for name, pid in pids.items():
                grown = private_bytes(pid) - at_quarter[name]
                told = f"{at_quarter[name] >> 20} MiB at a quarter, {grown >> 20} MiB more"
                print(f"{kind}: {name}: {told}", flush=True)
                assert grown < GROWTH * at_quarter[name] + SLACK_BYTES, (kind, name)

        tally = await fuzz(
            service.channel, SEED, NUM_REQUESTS, after=lambda done: after(done, NUM_REQUESTS)
        )
        print("gRPC:", dict(tally.codes))
        assert tally.faults == []
        assert tally.codes.total() == NUM_REQUESTS
        assert tally.codes["INVALID_ARGUMENT"] > NUM_REQUESTS / 4
        await check_memory("gRPC")
        url = f"http://{service.router.http_address}"
        over_http = await fuzz_http(url, SEED, NUM_HTTP, after=lambda done: after(done, NUM_HTTP))
        print("HTTP:", dict(over_http.statuses))
        assert over_http.faults == []
        assert over_http.statuses.total() == NUM_HTTP
        assert over_http.statuses[400] > NUM_HTTP / 4
        await service.wait_idle()
        assert service.router.num_in_flight == 0
        assert service.router.counters.failed == 0
        assert service.control.lost == []
        assert all(worker.process.process.poll() is None for worker in service.workers)
        assert (await canary(service)).token_ids == before.token_ids
        await check_memory("HTTP")
