"""The cancel table, hand-offs that wait: a broken link goes on where it was, and KV whose decode
worker was lost is kept for another one, for a while.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from table_scene import TableScene
from table_state import CHUNK_BYTES, HANDOFF_BYTES, PROMPT, State

from legato.worker.services.prefill_call import RETARGET_WAIT_S

if TYPE_CHECKING:
    from client_stream import Stream

FULL = os.environ.get("LEGATO_FAULT_CASES") == "full"
CANCEL_BOUND_S = 0.1 * 20  # 100 ms, as long as two busy cores may make of it
BOUND_S = 5.0 + 3.0  # as a dead peer's leases
LANES = ("grpc", "auto")  # auto: shared memory


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", CHUNK_BYTES)


@pytest.mark.parametrize("lane", LANES)
async def test_a_broken_link_goes_on_from_the_acked_offset(lane: str) -> None:
    async with TableScene(lane=lane) as scene:
        stream = await scene.bring(State.AMID_ROWS)
        [p], [d] = scene.prefills, scene.decodes
        assert d.load().kv_bytes_received > 0
        scene.link_cables[id(p), id(d)].reset()
        scene.release()
        timings = await stream.exact()
        assert (timings.attempts, timings.retargets) == (1, 0)
        assert p.server.node.transfers.resumed == 1
        assert d.load().kv_bytes_received == HANDOFF_BYTES, "what had landed was sent again"
        assert p.load().prefill_tokens == len(PROMPT)
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, BOUND_S)


async def test_a_cancel_while_the_kv_waits_for_another_decode_worker() -> None:
    async with TableScene() as scene:
        stream = await lose_the_only_decode_worker(scene)
        scene.struck_at_s = time.monotonic()
        stream.call.cancel()
        took_s = await scene.until_free(scene.workers, CANCEL_BOUND_S)
        await scene.until_router_free(BOUND_S)
        print(f"waits for a decode worker | cancel | {took_s * 1e3:.0f} ms")


@pytest.mark.skipif(not FULL, reason="10 s: only at full size")
async def test_kv_that_no_other_decode_worker_comes_for() -> None:
    """For 5 s the lost one may come back; then for 5 s another one may come."""
    async with TableScene() as scene:
        stream = await lose_the_only_decode_worker(scene)
        took_s = await scene.until_free(scene.workers, BOUND_S + RETARGET_WAIT_S)
        assert not stream.reading.done(), "it waits for a worker, and has nothing"
        print(f"waits for a decode worker | nobody comes | {took_s:.2f} s")


async def lose_the_only_decode_worker(scene: TableScene) -> Stream:
    stream = await scene.bring(State.AMID_ROWS)
    [p], [d] = scene.prefills, scene.decodes
    scene.struck_at_s = time.monotonic()
    ending = asyncio.create_task(d.server.stop(0))
    await scene.until(lambda: scene.router.admission.num_queued == 1)
    scene.workers.remove(d)
    await ending
    assert p.load().held_blocks > 0
    return stream
