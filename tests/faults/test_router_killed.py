"""A router of two is killed, or hangs, under many streams of the client: none is lost.

With LEGATO_KILLS=full (`make test-kills`) they are a hundred.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from history import check_all
from kill_rig import logged_service
from owners import running_at
from router_rig import BOUND_S, RouterRig
from served import legato
from tiny_models import make_llama_folder
from workload import again, mixed, run_all

from legato.cluster.client import AsyncClient
from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from history import CallHistory

    from legato.protos import generation_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FULL = os.environ.get("LEGATO_KILLS") == "full"
NUM_STREAMS, NUM_STREAMS_OF_HANG = 100 if FULL else 50, 24
MIN_RUNNING = 30 if FULL else 15  # streams that workers have for the router when it is struck
MIN_HIT = 20 if FULL else 10  # a run that hits fewer shows nothing
HANG_S = 4.0  # longer than clients wait, and less than its owner does
AT_ONCE = 24
# Longer than it takes to notice a router that hangs, and to be served by the other one.
GAP_BOUND_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterRig]:
    folder = tmp_path_factory.mktemp("service")
    with logged_service(model, folder, "--routers", "2", prefill=1, decode=2) as (served, log):
        yield RouterRig(served, log)


@pytest.fixture(scope="module")
def text(model: Path) -> ModelText:
    return ModelText.load(model)


def workload(number: int, seed: int) -> list[generation_pb2.GenerateRequest]:
    """All kinds; of those that draw by a seed half leave it to the router."""
    requests = mixed(number, seed=seed, longest_prompt=300, longest_answer=900)
    for request in requests[1::4]:
        if request.sampling.temperature > 0:
            request.sampling.ClearField("seed")
    return requests


async def undisturbed(
    rig: RouterRig, calls: Sequence[CallHistory], requests: Sequence[generation_pb2.GenerateRequest]
) -> dict[str, CallHistory]:
    """What each of the calls was to bring, with the seed that it says it had drawn with."""
    alone = []
    for call, request in zip(calls, requests, strict=True):
        copy = again(request, " alone")
        if (finish := call.finish(0)) is not None:
            copy.sampling.seed = finish.seed
        alone.append(copy)
    references = await run_all(rig.served.address, alone, at_once=AT_ONCE)
    return {call.request_id: it for call, it in zip(calls, references, strict=True)}


def check_seeds(
    calls: Sequence[CallHistory], requests: Sequence[generation_pb2.GenerateRequest]
) -> list[str]:
    """Answer i of each drew with the first one's seed + i, which is what was asked for."""
    wrong: list[str] = []
    for call, request in zip(calls, requests, strict=True):
        seeds = [end.seed for i in range(call.num_answers) if (end := call.finish(i)) is not None]
        first = request.sampling.seed if request.sampling.HasField("seed") else seeds[:1]
        expected = [*range(seeds[0], seeds[0] + len(seeds))] if seeds else []
        if seeds != expected or first not in (seeds[:1], *seeds[:1]):
            wrong.append(f"{call.request_id}: seeds {seeds}")
    return wrong


async def check(
    rig: RouterRig,
    text: ModelText,
    calls: Sequence[CallHistory],
    requests: Sequence[generation_pb2.GenerateRequest],
) -> list[str]:
    """Everything that is wrong, as clients and as the routers' log have it."""
    await rig.until_idle()
    references = await undisturbed(rig, calls, requests)
    await rig.until_idle()
    wrong = check_all(references.values(), {}, text.decode)
    wrong += check_all(calls, references, text.decode)
    return wrong + check_seeds(calls, requests) + rig.check_owners()


def counts_of(
    calls: Sequence[CallHistory],
    requests: Sequence[generation_pb2.GenerateRequest],
    hits: Sequence[tuple[set[str], Counter[str]]],
    wrong: Sequence[str],
) -> dict[str, object]:
    return {
        "streams": len(calls),
        "hit": [len(names) for names, _ in hits],
        "hit_answers": [dict(sorted(phases.items())) for _, phases in hits],
        "resumed": sum(call.num_calls > 1 for call in calls),
        "lost": sum(bool(call.error) for call in calls),
        "wrong": len(wrong),
        "seeds_drawn": sum(not request.sampling.HasField("seed") for request in requests),
        "tokens": sum(len(piece.token_ids) for call in calls for piece in call.pieces),
        "longest_gap_s": round(max(call.longest_gap_s() for call in calls), 2),
    }


async def test_the_death_of_either_router_costs_no_stream(rig: RouterRig, text: ModelText) -> None:
    dice = random.Random(5)
    calls: list[CallHistory] = []
    requests: list[generation_pb2.GenerateRequest] = []
    back_s: list[float] = []
    async with AsyncClient(rig.served.address) as client:
        for number, address in enumerate(rig.addresses):
            batch = [again(r, f" {number}") for r in workload(NUM_STREAMS, seed=number)]
            calls += await rig.strike_amid(
                client,
                batch,
                rig.process_at(address),
                rig.kill,
                least=MIN_RUNNING,
                delay_s=dice.uniform(0, 0.3),
            )
            requests += batch
            async with AsyncClient(address) as of_this:
                await of_this.wait_ready(BOUND_S)
            back_s.append(round(time.time() - rig.ends[-1].at_s, 1))
    hits = [running_at(rig.lines(), end) for end in rig.ends]
    wrong = await check(rig, text, calls, requests)
    counts = {**counts_of(calls, requests, hits, wrong), "back_within_s": back_s}
    print(json.dumps(counts))
    assert all(len(names) >= MIN_HIT for names, _ in hits), f"too few were hit: {counts}"
    assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
    hit = set.union(*(names for names, _ in hits))
    by_name = {call.request_id: call for call in calls}
    assert all(by_name[name].num_calls > 1 for name in hit), "it was not on the killed router"
    assert max(call.longest_gap_s() for call in calls) < GAP_BOUND_S, f"{counts}"


async def test_a_router_that_stands_still_costs_no_stream_and_no_worker(
    rig: RouterRig, text: ModelText
) -> None:
    requests = [again(r, " hang") for r in workload(NUM_STREAMS_OF_HANG, seed=9)]
    first, second = rig.addresses
    router = rig.process_at(first)
    async with AsyncClient(second) as other, AsyncClient(rig.served.address) as client:
        pids = {w.pid for pool in (await other.status()).pools for w in pool.workers}
        striking = asyncio.create_task(
            rig.strike_amid(client, requests, router, rig.stop, least=6, delay_s=0.1)
        )
        try:
            while not rig.ends or rig.ends[-1].router != router.pid:
                assert not striking.done(), striking.result()
                await asyncio.sleep(0.02)
            asked_s = time.time()
            told = await asyncio.to_thread(legato, "status", "--address", rig.served.address)
            told_s = time.time() - asked_s
            await asyncio.sleep(rig.ends[-1].at_s + HANG_S - time.time())
        finally:
            rig.run_on(router)
        calls = await striking
        end = next(end for end in rig.ends if end.router == router.pid)
        hits = [running_at(rig.lines(), end)]
        wrong = await check(rig, text, calls, requests)
        after = {w.pid for pool in (await other.status()).pools for w in pool.workers}
    counts = {**counts_of(calls, requests, hits, wrong), "status_told_within_s": round(told_s, 1)}
    print(json.dumps(counts))
    assert hits[0][0], f"none was hit: {counts}"
    assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
    assert after == pids, "it took its own silence for that of the workers"
    assert (told.returncode, told.stderr) == (0, "")
