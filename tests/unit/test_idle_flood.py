"""Many connections that ask nothing take the service from nobody who has one, nor over HTTP.

Small by default; with LEGATO_IDLE_FLOOD=full (`make test-idle`) as many as this process may open.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import FakeWorker
from idle_flood import Canary, Idle, IdleFlood, percentiles_ms
from limited_service import LimitedService
from router_service import Service, ask, check_whole, collect

from legato.cluster import gateway

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = os.environ.get("LEGATO_IDLE_FLOOD") == "full"
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
MAX_OPEN_FILES = HARD_LIMIT if FULL else 400
NUM_IDLE = HARD_LIMIT - 500 if FULL else 1200  # 500: what else this process has open
NUM_ASKED = 100 if FULL else 10
MOST_KB = 40  # of memory for each connection
WAIT_BOUND_S = 2.0  # milliseconds, on a machine that does nothing else


@pytest.mark.timeout(150)
async def test_who_asks_is_answered_while_others_are_idle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = LimitedService(MAX_OPEN_FILES)
    with service as ports:
        flood = IdleFlood(ports)
        async with Canary(ports) as canary:
            waits = {"before": await canary.waits_s(NUM_ASKED)}
            before_mb = service.memory_mb()
            begun_s = time.monotonic()
            num_opened = await flood.open(tuple(Idle), NUM_IDLE)
            opened_s = time.monotonic() - begun_s
            waits["with"] = await canary.waits_s(NUM_ASKED)
            num_held, taken_mb = flood.num_held(), service.memory_mb() - before_mb
            begun_s = time.monotonic()
            newcomer = await canary.newcomer()
            newcomer_s = time.monotonic() - begun_s
            flood.close()
            waits["after"] = await canary.waits_s(NUM_ASKED)
            newcomer_after = await canary.newcomer()
    shown = {
        "open_files": MAX_OPEN_FILES,
        "opened": num_opened,
        "opened_s": round(opened_s, 1),
        "held": num_held,
        "memory_mb": round(taken_mb),
        "canary": {when: percentiles_ms(waits_s) for when, waits_s in waits.items()},
        "grpc_newcomer": [newcomer.name, round(newcomer_s, 3), newcomer_after.name],
    }
    if FULL:
        with capsys.disabled():
            print(json.dumps(shown))
    assert num_opened == NUM_IDLE, "the kernel takes all of them, and the service ends some"
    assert 0 < num_held < 0.8 * MAX_OPEN_FILES
    assert taken_mb < num_held * MOST_KB / 1000 + 20
    for waits_s in waits.values():
        assert max(map(max, waits_s.values())) < WAIT_BOUND_S
    # Full of connections that speak HTTP/2, the port says no at once, until those have gone.
    assert newcomer in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
    assert newcomer_s < WAIT_BOUND_S
    assert newcomer_after is grpc.StatusCode.OK
    for complaint in ("out of system resource", "Too many open files"):
        assert complaint not in service.log


async def test_clients_and_streams_outlive_the_end_of_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = "grpc.max_connection_idle_ms"
    others: Sequence[tuple[str, int]] = [o for o in gateway.SERVER_OPTIONS if o[0] != idle]
    monkeypatch.setattr(gateway, "SERVER_OPTIONS", (*others, (idle, 200)))
    decode = FakeWorker("decode", step_s=0.05)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        for _ in range(2):
            check_whole(await collect(service, ask("hello", 20)), "hello", 20)  # a second
            await asyncio.sleep(0.6)
