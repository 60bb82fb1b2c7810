"""Real workers between which no KV passes, while the router hears each of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
import pytest
from table_scene import TableScene
from table_state import CHUNK_BYTES, PROMPT, State

from legato.cluster import path_policies
from legato.worker.handoff import incoming, lanes, link, link_session, transfer

if TYPE_CHECKING:
    from legato.cluster.worker_view import WorkerView

PATIENCE_S = 1.0
BROKEN = pytest.mark.parametrize("how", ["refused", "swallowed"])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times, in their proportions."""
    monkeypatch.setattr(lanes, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(link, "BEAT_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S", PATIENCE_S / 2)
    monkeypatch.setattr(transfer, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", PATIENCE_S / 2.5)
    monkeypatch.setattr(path_policies, "NO_WAY_S", PATIENCE_S)


def break_paths(scene: TableScene, how: str, *, prefill: int, decodes: int) -> None:
    """From one prefill worker to the first of the decode workers."""
    for decode in scene.decodes[:decodes]:
        cable = scene.link_cables[id(scene.prefills[prefill]), id(decode)]
        cable.cut() if how == "refused" else cable.freeze()


def blamed(scene: TableScene) -> list[str]:
    views: list[WorkerView] = scene.router.pool.views()
    assert scene.router.control.lost == []  # type: ignore[attr-defined]  # of the fake
    return [view.worker_id for view in views if view.failed_requests]


@BROKEN
async def test_one_of_two_is_out_of_reach_and_keeps_its_good_name(how: str) -> None:
    async with TableScene(decodes=2) as scene:
        break_paths(scene, how, prefill=0, decodes=1)
        for number in range(4):
            await scene.ask(num_tokens=4, cache_salt=str(number)).exact()
        assert scene.prefills[0].load().prefill_tokens == 4 * len(PROMPT), "a second prefill"
        assert blamed(scene) == []
        assert len(scene.router.pool.paths.closed()) == 1
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, 10)


@BROKEN
async def test_the_only_pair_ends_in_time_and_names_both(how: str) -> None:
    async with TableScene() as scene:
        break_paths(scene, how, prefill=0, decodes=1)
        begun_s = time.monotonic()
        stream = scene.ask()
        await stream.reading
        # Twice as long as one path is waited for; the rest is for a busy machine.
        assert time.monotonic() - begun_s < 2 * PATIENCE_S + 5
        assert stream.error is not None
        assert stream.error.code() is grpc.StatusCode.UNAVAILABLE
        details = stream.error.details() or ""
        for worker in scene.workers:
            assert worker.server.worker_id in details
        assert "out of reach" in details
        assert details.isprintable()
        assert blamed(scene) == []
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, 10)
        await scene.until_router_free(10)


@BROKEN
async def test_a_prefill_worker_that_is_cut_off_is_the_one_to_blame(how: str) -> None:
    async with TableScene(prefills=2, decodes=2) as scene:
        first = min(range(2), key=lambda number: scene.prefills[number].server.worker_id)
        break_paths(scene, how, prefill=first, decodes=2)
        timings = await scene.ask().exact()
        assert (timings.attempts, timings.retargets) == (3, 1)
        assert timings.prefill_worker == scene.prefills[1 - first].server.worker_id
        assert blamed(scene) == [scene.prefills[first].server.worker_id]
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, 10)


async def test_a_ticket_that_lapses_is_not_the_decode_workers_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it notices before the sender does that no KV comes any more."""
    for module in (incoming, link_session):
        monkeypatch.setattr(module, "LEASE_S", 0.2)
    monkeypatch.setattr(link_session, "MAX_SILENCE_S", 0.5)
    monkeypatch.setattr(link, "SILENCE_S", 10.0)
    monkeypatch.setattr(transfer, "PATIENCE_S", 10.0)
    caplog.set_level("INFO", "legato.cluster.request_life")
    async with TableScene(decodes=2) as scene:
        stream = await scene.bring(State.AMID_ROWS)
        cut_off = scene.at_work("decode")
        scene.link_cables[id(scene.prefills[0]), id(cut_off)].freeze()
        scene.release(but=cut_off)
        timings = await stream.exact()
        assert (timings.attempts, timings.retargets) == (2, 1)
        assert "no KV came for 0.2 s" in caplog.text
        assert scene.router.pool.paths.closed() == {
            (scene.prefills[0].server.worker_id, cut_off.server.worker_id)
        }
        assert blamed(scene) == []
