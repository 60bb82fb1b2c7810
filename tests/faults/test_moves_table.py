"""Rows of the cancel table for an answer that moves: struck at each stage, on both lanes. What it
held comes back on both workers, and where the client stays it has every token, once.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING

import pytest
from table_scene import TableScene
from table_state import (
    CHUNK_BYTES,
    HELD_DECODE_STEP,
    NUM_TOKENS,
    OTHER_PROMPT,
    PROMPT,
    State,
    gate_of,
)

from legato.worker.commands import Park
from legato.worker.handoff import link, transfer

if TYPE_CHECKING:
    from client_stream import Stream
    from worker_pair import Worker

BOUND_S = 2.0  # as in the cancel table; no silence or lease of ours ends within it
DEATH_BOUND_S = 12.0  # a lost worker, or a path, may take so long to be given up
PATH_PATIENCE_S = 2.0  # shorter than the product's 5, in its proportion to the silence
NUM_ROWS = len(PROMPT) + HELD_DECODE_STEP


class Stage(Enum):
    """Where the move is when it is struck."""

    PAUSING = "to be parked, its step under way"
    PARKED = "parked, no ticket yet"
    BEFORE_ROWS = "moving, no rows yet"
    AMID_ROWS = "moving, in the middle"
    BEFORE_COMMIT = "moving, not committed"
    ARRIVED = "arrived, its first step there under way"


GATES = {
    Stage.BEFORE_ROWS: State.BEFORE_ROWS,
    Stage.AMID_ROWS: State.AMID_ROWS,
    Stage.BEFORE_COMMIT: State.BEFORE_COMMIT,
}
LANES = ("grpc", "auto")


@pytest.fixture(autouse=True)
def small_chunks_and_every_answer_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", CHUNK_BYTES)
    monkeypatch.setattr("legato.cluster.move_policies.LEAST_LEFT_S", 0.0)


async def bring(scene: TableScene, stage: Stage) -> tuple[Stream, Worker, Worker]:
    """The stream, the worker that it leaves and the one that it goes to; the gauges prove it."""
    stream = await scene.bring(State.DECODING, timeout_s=None)
    source = scene.at_work("decode")
    [target] = [worker for worker in scene.decodes if worker is not source]
    engine = source.server.node.engine
    scene.holds[id(target)].arm(1 if stage is Stage.ARRIVED else 0)
    if stage in GATES:
        scene.links[id(source), id(target)].gate_when = gate_of(GATES[stage], 2)
    if stage is Stage.PARKED:
        scene.to_worker[id(target)].freeze()
    await scene.drain(source)
    await scene.until(lambda: any(isinstance(c, Park) for c in engine._commands._commands))
    if stage is Stage.PAUSING:
        return stream, source, target
    scene.release_steps(source)

    def stands() -> bool:
        at_source, at_target = source.load(), target.load()
        landing = at_target.transferring == 1 and at_source.held_blocks > 0
        committed = at_target.kv_transfers_completed
        match stage:
            case Stage.PARKED:
                scheduler = engine._capacity_scheduler()
                return len(scheduler._live.parked) == 1 and not len(target.server.node.tickets)
            case Stage.ARRIVED:
                return scene.holds[id(target)].is_inside and at_source.held_blocks == 0
        gated = scene.links[id(source), id(target)].num_waiting > 0
        return landing and gated and not committed and at_source.running == 1

    await scene.until(lambda: stands() and len(stream.tokens) == HELD_DECODE_STEP + 1)
    return stream, source, target


CAUSES = ("cancel", "client gone", "router gone")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.value)
async def test_everything_comes_back(stage: Stage, cause: str, lane: str) -> None:
    async with TableScene(decodes=2, lane=lane) as scene:
        stream, source, target = await bring(scene, stage)
        scene.strike(stream, cause)
        if stage is Stage.PARKED and cause != "router gone":
            scene.to_worker[id(target)].thaw()
        busy = {Stage.PAUSING: source, Stage.ARRIVED: target}.get(stage)
        others = [worker for worker in scene.workers if worker is not busy]
        took_s = await scene.until_free(others, BOUND_S)
        if cause != "router gone":
            await asyncio.wait_for(stream.reading, BOUND_S)
        scene.release()
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, BOUND_S)
        if cause != "router gone":
            await scene.until_router_free(BOUND_S)
            await scene.canary()
        print(f"{stage.value} | {cause} | {lane} | {took_s * 1e3:.0f} ms")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("victim", ["source", "target", "path"])
@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.value)
async def test_a_loss_on_the_way_costs_no_token(
    stage: Stage, victim: str, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if victim == "target" and stage is Stage.ARRIVED:
        pytest.skip("nobody else would take it: see the unit tests")
    if victim == "path":
        if stage not in GATES:
            pytest.skip("nothing is on the path")
        monkeypatch.setattr(link, "SILENCE_S", PATH_PATIENCE_S / 2)
        monkeypatch.setattr(transfer, "PATIENCE_S", PATH_PATIENCE_S)
    async with TableScene(decodes=2, prefills=1, lane=lane) as scene:
        stream, source, target = await bring(scene, stage)
        scene.struck_at_s = time.monotonic()
        lost = {"source": source, "target": target}.get(victim)
        ending = None
        if lost is not None:
            scene.release_steps(lost)
            ending = asyncio.create_task(lost.server.stop(0))
            scene.to_worker[id(lost)].cut()
        else:
            scene.link_cables[id(source), id(target)].freeze()
        if stage is Stage.PARKED and victim == "source":
            scene.to_worker[id(target)].thaw()
        scene.release() if lost is None else scene.release(but=lost)
        timings = await asyncio.wait_for(stream.exact(), DEATH_BOUND_S + BOUND_S)
        assert len(stream.tokens) == NUM_TOKENS
        went_on_s = time.monotonic() - scene.struck_at_s
        match victim, stage:
            case "source", Stage.ARRIVED:
                assert (timings.moves, timings.prefill_forwards) == (1, 4)
            case "source", _:
                assert (timings.moves, timings.prefill_forwards > 4) == (0, True), "replayed"
            case "target", _:
                assert (timings.moves, timings.prefill_forwards) == (0, 4), "it stays"
            case "path", _:
                assert timings.prefill_forwards == 4, "nothing is computed again"
        survivors = [worker for worker in scene.workers if worker is not lost]
        scene.struck_at_s = time.monotonic()
        await scene.until_free(survivors, DEATH_BOUND_S)
        if ending is not None and lost is not None:
            await ending
            scene.workers.remove(lost)
        if victim != "target":
            await scene.canary()
        print(f"{stage.value} | {victim} | {lane} | went on to its end in {went_on_s:.2f} s")


@pytest.mark.parametrize("lane", LANES)
async def test_nothing_in_the_way(lane: str) -> None:
    async with TableScene(decodes=2, lane=lane) as scene:
        stream, source, target = await bring(scene, Stage.BEFORE_ROWS)
        sent = source.load().kv_bytes_sent
        scene.release()
        timings = await stream.exact()
        assert (timings.moves, timings.attempts, timings.prefill_forwards) == (1, 1, 4)
        assert source.load().kv_bytes_sent > sent
        assert target.load().prefill_tokens == 0
        await scene.canary()
        await scene.ask(OTHER_PROMPT, 8, direct=True).exact(OTHER_PROMPT)
