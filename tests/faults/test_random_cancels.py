"""300 requests are cancelled, each at some moment: every gauge of both sides, and of the router, is
back where it was within 5 s.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, cast

import pytest
from table_scene import TableScene
from table_state import CHUNK_BYTES, MODEL

from legato.worker.handoff.tickets import TicketState

if TYPE_CHECKING:
    from client_stream import Stream
    from torch import Tensor
    from worker_pair import Worker

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache

NUM_REQUESTS = 300
AT_ONCE = 25
BOUND_S = 5.0
LONGEST_S = 0.8  # from the asking to the cancel
STEP_S = 0.004
LINK_BYTES_PER_S = 300_000
BLOCKS = 160  # of 4 rows: for some of them, while the others are queued


class Phase(Enum):
    """Where a request is when it is cancelled."""

    QUEUED = "queued"
    TICKETED = "ticketed"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing off"
    DECODING = "decoding"
    OVER = "over"


def phase_of(scene: TableScene, stream: Stream, request_id: str) -> Phase:
    if stream.reading.done():
        return Phase.OVER
    tickets = [t for d in scene.decodes for t in d.server.node.tickets._by_epoch.values()]
    mine = [ticket for ticket in tickets if ticket.key.request_id == request_id]
    if not mine:
        return Phase.OVER if stream.tokens else Phase.QUEUED
    match mine[-1].state:
        case TicketState.RESERVED:
            return Phase.TICKETED
        case TicketState.DECODING:
            return Phase.DECODING
    return Phase.HANDING_OFF if stream.tokens else Phase.PREFILLING


def slow_down(worker: Worker) -> None:
    """Phases last long enough to be hit."""
    forward = worker.model.forward

    def slow(batch: ForwardBatch, cache: KvCache) -> Tensor:
        time.sleep(STEP_S)
        return cast("Tensor", forward(batch, cache))

    worker.model.forward = slow


@pytest.mark.parametrize("lane", ["grpc", "auto"])
async def test_cancels_at_random_moments(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", CHUNK_BYTES)
    dice = random.Random(11)
    hits: Counter[Phase] = Counter()
    room = {"num_blocks": BLOCKS}
    async with TableScene(lane=lane, p=room, d=room) as scene:
        for worker in scene.workers:
            slow_down(worker)
        for cable in scene.link_cables.values():
            cable.bytes_per_s = LINK_BYTES_PER_S

        async def one(number: int) -> None:
            prompt = [dice.randrange(320) for _ in range(dice.randrange(1, 80))]
            num_tokens, request_id = dice.choice((2, 60)), f"cancelled {number}"
            stream = scene.ask(prompt, num_tokens, request_id=request_id)
            await asyncio.sleep(dice.random() * LONGEST_S)
            hits[phase_of(scene, stream, request_id)] += 1
            stream.call.cancel()
            scene.struck_at_s = time.monotonic()
            await stream.reading
            assert stream.finish is not None or stream.call.cancelled(), stream.error
            assert stream.tokens == MODEL.expected(prompt, len(stream.tokens))

        slowest_s = 0.0
        for start in range(0, NUM_REQUESTS, AT_ONCE):
            await asyncio.gather(*map(one, range(start, start + AT_ONCE)))
            slowest_s = max(slowest_s, await scene.until_free(scene.workers, BOUND_S))
            await scene.until_router_free(scene.left_s(BOUND_S))
        told = {phase.value: hits[phase] for phase in Phase}
        print(f"{lane}: {told}, all free after {slowest_s:.2f} s at most")
        assert hits.total() == NUM_REQUESTS
        assert all(hits[phase] for phase in Phase), f"some were never hit: {told}"
        await scene.canary()
