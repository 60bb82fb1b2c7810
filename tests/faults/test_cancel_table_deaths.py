"""The cancel table, row by row: a worker or the router dies, is cut off or hangs. What it held and
what was held for it comes back in time; the answer goes on elsewhere and is exact.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from table_scene import TableScene, side_by_side
from table_state import (
    CHUNK_BYTES,
    HELD_DECODE_STEP,
    NUM_TOKENS,
    OTHER_PROMPT,
    PROMPT,
    State,
)

from legato.worker.lifecycle import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tcp_proxy import TcpProxy
    from worker_pair import Worker

    from legato.cluster.control_plane import Role
    from legato.protos import generation_pb2

FULL = os.environ.get("LEGATO_FAULT_CASES") == "full"
# A dead peer's leases end within 5 s; for two busy cores there are 3 s more.
BOUND_S = 5.0 + 3.0
# Frames of rows that have passed when the middle of a hand-off is struck.
ROWS_PASSED = tuple(range(1, 12)) if FULL else (2,)
LANES = ("grpc", "auto")  # auto: shared memory
STATES = tuple(s for s in State if s is not State.FINISHED)
ROLES: tuple[Role, ...] = ("decode", "prefill")
LINK_LOSSES = ("link cut", "link hung")
LATER = (State.QUEUED, State.DECODING, State.LOCAL_PREFILL)  # or not yet
BEFORE_DECODE = tuple(s for s in STATES if s not in LATER)


FULL_POOL = {"num_blocks": 20}  # by one prompt, where a second one is to queue


@pytest.fixture(autouse=True)
def small_chunks_and_local_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", CHUNK_BYTES)
    monkeypatch.setattr("legato.cluster.attempt.prefills_locally", lambda *_: True)


@dataclass(frozen=True)
class Case:
    """`loss`: dead (its server stops), cut (both ends live, no connection does), hung (connections
    stay, and nothing moves).
    """

    state: State
    role: Role
    loss: str
    lane: str
    rows_passed: int = 2

    def __str__(self) -> str:
        rows = f", {self.rows_passed} frames" if self.state is State.AMID_ROWS else ""
        return f"{self.state.value}{rows} | {self.role} worker {self.loss} | {self.lane}"


def cases(role: Role, loss: str, states: Iterable[State] = STATES) -> list[Case]:
    """Hand-offs on both lanes, in turn where the size is not full."""
    made = []
    for number, state in enumerate(states):
        lanes: Sequence[str] = LANES[:1]
        if state.hands_off:
            lanes = LANES if FULL or loss == "dead" else (LANES[number % 2],)
        rows_passed = ROWS_PASSED if state is State.AMID_ROWS and loss in ("dead", "cut") else (2,)
        made += [Case(state, role, loss, lane, n) for lane in lanes for n in rows_passed]
    return made


def cables_of(scene: TableScene, worker: Worker) -> list[TcpProxy]:
    links = [cable for ends, cable in scene.link_cables.items() if id(worker) in ends]
    return [scene.to_worker[id(worker)], *links]


async def end_without_a_word(victim: Worker) -> None:
    """A process that is killed does not report that it drains."""
    assert victim.server._server is not None
    await victim.server._server.stop(0)
    await victim.server.stop(0)


def strike(scene: TableScene, victim: Worker, loss: str) -> asyncio.Task[None] | None:
    """The task that ends a dead one's process, for it waits for the step under way."""
    scene.struck_at_s = time.monotonic()
    match loss:
        case "dead":
            return asyncio.create_task(end_without_a_word(victim))
        case "cut":
            for cable in cables_of(scene, victim):
                cable.cut()
        case "hung":
            for cable in cables_of(scene, victim):
                cable.freeze()
    return None


async def lose_a_worker(case: Case) -> None:
    counts = {"prefills" if case.role == "prefill" else "decodes": 2}
    local = case.state is State.LOCAL_PREFILL
    async with TableScene(
        lane=case.lane,
        local=local,
        p=FULL_POOL if case.state is State.QUEUED else None,
        rows_passed=case.rows_passed,
        **counts,  # type: ignore[arg-type]  # numbers
    ) as scene:
        stream = await scene.bring(case.state)
        victim = scene.at_work(case.role)
        survivors = [worker for worker in scene.workers if worker is not victim]
        assert scene.stands_in(case.state, stream)
        ending = strike(scene, victim, case.loss)

        # The others go on; the victim's steps and frames stand where they stood.
        scene.release(but=victim)
        timings = await stream.exact()
        went_on_s = time.monotonic() - scene.struck_at_s
        assert len(stream.tokens) == NUM_TOKENS
        for other in scene.streams[:-1]:
            await other.exact(OTHER_PROMPT)
        took_s = await scene.until_free(survivors, BOUND_S)
        check_way(case, timings, scene, victim)

        # Cut off, the victim frees what it holds by itself, as soon as its step is over.
        scene.release_steps(victim)
        victims_s = 0.0
        if ending is None:
            victims_s = await scene.until_free([victim], BOUND_S)
        else:
            await ending
            scene.workers.remove(victim)
        for cable in cables_of(scene, victim):
            cable.thaw()
        scene.release()
        await scene.canary()
        print(
            f"{case} | stream's end {went_on_s:.2f} s, others free {took_s:.2f} s, "
            f"victim {victims_s:.2f} s"
        )


def check_way(
    case: Case, timings: generation_pb2.Timings, scene: TableScene, victim: Worker
) -> None:
    """Where the answer was computed, and how often."""
    if case.state is State.QUEUED:
        assert (timings.attempts, timings.retargets) == (1, 0), "it had been sent nowhere"
        return
    prefilled = sum(p.load().prefill_tokens for p in scene.prefills if p is not victim)
    committed = sum(d.load().kv_transfers_completed for d in scene.decodes if d is not victim)
    blockers = sum(len(OTHER_PROMPT) for _ in scene.streams[:-1])
    if case.role == "decode":
        assert timings.attempts == 2
        if case.state in BEFORE_DECODE:
            assert timings.retargets == 1
            assert prefilled == len(PROMPT) + blockers, "a second prefill"
        elif case.state is State.DECODING:
            assert timings.retargets == 0
            assert prefilled > len(PROMPT), "the emitted tokens were not replayed"
        assert committed == (case.state is not State.LOCAL_PREFILL)
    elif case.state in BEFORE_DECODE:
        assert (timings.attempts, timings.retargets) == (2, 0)
        emitted = int(case.state.hands_off)  # it is replayed
        assert prefilled == len(PROMPT) + emitted + blockers
        assert committed == 1
    else:
        assert (timings.attempts, prefilled) == (1, 0), "it needed no prefill worker any more"
        assert committed == (case.state is State.DECODING)


@pytest.mark.parametrize("loss", ["dead", "cut"])
@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_is_lost(role: Role, loss: str) -> None:
    await side_by_side(cases(role, loss), lose_a_worker)


async def lose_the_link(case: Case) -> None:
    """Both workers live, and the router hears both; for good, there is no way between the two."""
    async with TableScene(lane=case.lane, decodes=2) as scene:
        stream = await scene.bring(case.state)
        cut_off = scene.at_work("decode")
        scene.struck_at_s = time.monotonic()
        cable = scene.link_cables[id(scene.prefills[0]), id(cut_off)]
        cable.cut() if case.loss == "link cut" else cable.freeze()
        scene.release(but=cut_off)
        timings = await stream.exact()
        went_on_s = time.monotonic() - scene.struck_at_s
        await scene.until_free(scene.workers, BOUND_S)
        check_way(case, timings, scene, cut_off)
        print(f"{case} | stream's end {went_on_s:.2f} s")


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_is_lost_after_the_end(role: Role) -> None:
    counts = {"prefills" if role == "prefill" else "decodes": 2}
    async with TableScene(**counts) as scene:  # type: ignore[arg-type]  # numbers
        stream = await scene.bring(State.FINISHED)
        await stream.exact()
        scene.struck_at_s = time.monotonic()
        await scene.until_free(scene.workers, BOUND_S)
        victim = scene.workers[0] if role == "prefill" else scene.workers[-1]
        ending = strike(scene, victim, "dead")
        assert ending is not None
        await ending
        scene.workers.remove(victim)
        await scene.canary()


async def strand(case: Case) -> None:
    """The router hangs: its calls stay open, and it says nothing more."""
    local = case.state is State.LOCAL_PREFILL
    p = FULL_POOL if case.state is State.QUEUED else None
    async with TableScene(lane=case.lane, local=local, p=p) as scene:
        await scene.bring(case.state)
        scene.struck_at_s = time.monotonic()
        for cable in scene.to_worker.values():
            cable.freeze()
        # Steps under way end only then: what follows them would end the request by itself.
        took_s = await scene.until(
            lambda: not any(w.server._lifecycle.num_calls for w in scene.workers), BOUND_S
        )
        for worker in scene.workers:
            scene.release_steps(worker)
        await scene.until_free(scene.workers, BOUND_S)
        assert sum(d.load().decode_steps for d in scene.decodes) <= HELD_DECODE_STEP
        print(f"{case.state.value} | router hung | {case.lane} | all calls ended {took_s:.2f} s")


async def hang_an_engine(case: Case) -> None:
    """Its process answers and reports, and a step never ends: the watchdog ends the worker."""
    counts = {"prefills" if case.role == "prefill" else "decodes": 2}
    async with TableScene(step_timeout_s=0.2, **counts) as scene:  # type: ignore[arg-type]  # numbers
        stream = await scene.bring(case.state)
        scene.struck_at_s = time.monotonic()
        victim = scene.at_work(case.role)
        scene.release(but=victim)
        timings = await stream.exact()
        went_on_s = time.monotonic() - scene.struck_at_s
        assert len(stream.tokens) == NUM_TOKENS
        check_way(case, timings, scene, victim)
        scene.workers.remove(victim)
        await scene.until_free(scene.workers, BOUND_S)
        assert victim.server.phase is Phase.DEAD
        scene.release_steps(victim)
        print(f"{case} | stream's end {went_on_s:.2f} s (limit of a step 0.2 s + 0.2 s a token)")


async def test_whoever_falls_silent() -> None:
    """Workers, their engines, the router, the way between two workers: silence is what tells."""
    hand_offs = [state for state in State if state.hands_off]
    runs = [(lose_a_worker, c) for role in ROLES for c in cases(role, "hung")]
    runs += [(strand, case) for case in cases("decode", "router hung")]
    runs += [(lose_the_link, c) for loss in LINK_LOSSES for c in cases("decode", loss, hand_offs)]
    # 16 tokens of a prompt, or one of decode, are in the step.
    runs.append((hang_an_engine, Case(State.PREFILLING, "prefill", "engine hung", "grpc")))
    runs.append((hang_an_engine, Case(State.DECODING, "decode", "engine hung", "grpc")))
    await side_by_side(runs, lambda run: run[0](run[1]))
