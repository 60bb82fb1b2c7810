"""Random workers of both pools are killed every few seconds under load, and nobody notices."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from history import check_all
from kill_rig import kill_rig, logged_service
from owners import hits_of
from tiny_models import make_llama_folder
from workload import again, mixed, run_all

from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from pathlib import Path

    from history import CallHistory
    from kill_rig import KillRig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FULL = os.environ.get("LEGATO_KILLS") == "full"
NUM_STREAMS, NUM_PROMPTS = (1000, 250) if FULL else (100, 50)
MIN_KILLS, MOST_KILLS = (20, 60) if FULL else (4, 12)
AT_ONCE = 24
PERIOD_S = 3.0 if FULL else 1.5  # between two kills, on average
CANCEL_EVERY = 25
DEADLINE_S = 240.0
# What must have been hit for the run to count. A few kills may all miss the short phases, whose
# every moment the tables of faults strike. With 24 at once hardly one ever waits in the router:
# that is `test_last_of_its_kind`'s, where all do.
DECODING = {"decode/decode"}
ON_THE_WAY = {"prefill/prefill", "prefill/handoff", "decode/prefill", "decode/handoff"}
MUST_HIT = DECODING | ON_THE_WAY if FULL else DECODING


async def test_kills_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=2048)
    with logged_service(model, tmp_path, prefill=2, decode=3) as (served, log):
        async with kill_rig(served, log) as rig:
            await kill_under_load(rig, ModelText.load(model))


async def kill_under_load(rig: KillRig, text: ModelText) -> None:
    requests = mixed(NUM_PROMPTS, seed=7, longest_prompt=400, longest_answer=200)
    started_s = time.monotonic()
    before = await run_all(rig.address, requests, at_once=AT_ONCE)
    quiet_s = time.monotonic() - started_s
    assert check_all(before, {}, text.decode) == []
    assert await rig.check_owners(before) == []
    num_lines = len(rig.lines())
    killing = asyncio.create_task(
        rig.strike_at_random(PERIOD_S, MOST_KILLS, least_alive=3, dice=random.Random(3))
    )
    started_s = time.monotonic()
    calls: list[CallHistory] = []
    while (
        len(calls) < NUM_STREAMS
        or len(rig.strikes) < MIN_KILLS
        or (len(rig.strikes) < MOST_KILLS and _missed(rig, num_lines))
    ):
        if killing.done():
            killing.result()  # why, if it was not the last of them
        round_of = [again(request, f" {len(calls) + i}") for i, request in enumerate(requests)]
        calls += await run_all(
            rig.address, round_of, at_once=AT_ONCE, timeout_s=DEADLINE_S, cancel_every=CANCEL_EVERY
        )
    struck_s = time.monotonic() - started_s
    killing.cancel()
    await asyncio.wait({killing})
    by_prompt = {call.request_id: call for call in before}
    references = {call.request_id: by_prompt[call.request_id.split()[0]] for call in calls}
    wrong = check_all(calls, references, text.decode)
    wrong += await rig.check_owners(calls)
    hits = hits_of(rig.lines()[num_lines:], rig.strikes)
    status = await rig.client.status()
    moved = [call for call in calls if (end := call.finish(0)) is not None and end.attempts > 1]
    counts = {
        "streams": len(calls),
        "kills": len(rig.strikes),
        "hits": dict(sorted(hits.items())),
        "moved": len(moved),
        "most_attempts": max(
            (end.attempts for call in moved if (end := call.finish(0))), default=1
        ),
        "cancelled": sum(call.cancelled_at_s is not None for call in calls),
        "failed": sum(bool(call.error) for call in calls),
        "wrong": len(wrong),
        "tokens": sum(len(piece.token_ids) for call in calls for piece in call.pieces),
        "seconds": round(struck_s, 1),
        "seconds_without_kills": round(quiet_s, 1),
    }
    print(json.dumps(counts))
    assert wrong == [], f"{len(wrong)} violations: {wrong[:10]}"
    assert status.router.failed == 0
    assert len(rig.strikes) >= MIN_KILLS, f"too few kills: {counts}"
    missed = _missed(rig, num_lines)
    assert not missed, f"no request was hit in {sorted(missed)}: {counts}"
    assert moved, f"the kills hit no stream: {counts}"


def _missed(rig: KillRig, num_lines: int) -> set[str]:
    """Of what must be hit, the phases that no strike has hit, by the lines behind so many."""
    hits = hits_of(rig.lines()[num_lines:], rig.strikes)
    return {phase for phase in MUST_HIT if not hits[phase]}
