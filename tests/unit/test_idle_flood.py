"""Many connections that ask nothing take the service from nobody."""

from __future__ import annotations

import json
import os
import resource
import time

import pytest
from idle_flood import Canary, Idle, IdleFlood, percentiles_ms
from limited_service import LimitedService

FULL = os.environ.get("LEGATO_IDLE_FLOOD") == "full"  # else some hundreds of connections
MAX_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if FULL else 400
# As many as this process may open itself, besides what else it has.
NUM_IDLE = MAX_OPEN_FILES - 1000 if FULL else 600
NUM_ASKED = 200 if FULL else 10
WAIT_BOUND_S = 2.0  # milliseconds, on a machine that does nothing else


@pytest.mark.parametrize("kinds", [list(Idle)[:1], list(Idle)[1:2], list(Idle)[2:]], ids=str)
async def test_who_asks_is_answered_while_others_are_idle(kinds: list[Idle]) -> None:
    with LimitedService(MAX_OPEN_FILES) as ports:
        flood = IdleFlood(ports)
        async with Canary(ports) as canary:
            waits = {"before": await canary.waits_s(NUM_ASKED)}
            begun_s = time.monotonic()
            num_opened = await flood.open(kinds, NUM_IDLE)
            opened_s = time.monotonic() - begun_s
            waits["with"] = await canary.waits_s(NUM_ASKED)
            num_held = flood.num_held()
            flood.close()
            waits["after"] = await canary.waits_s(NUM_ASKED)
        shown = {
            "kinds": [kind.value for kind in kinds],
            "open_files": MAX_OPEN_FILES,
            "opened": num_opened,
            "opened_s": round(opened_s, 1),
            "held": num_held,
            "canary": {when: percentiles_ms(waits_s) for when, waits_s in waits.items()},
        }
        print(json.dumps(shown))
        assert num_opened == NUM_IDLE, "the kernel takes all of them, and the service ends some"
        assert 0 < num_held < MAX_OPEN_FILES / 2
        for waits_s in waits.values():
            assert max(map(max, waits_s.values())) < WAIT_BOUND_S
