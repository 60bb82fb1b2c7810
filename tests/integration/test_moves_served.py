"""The whole service: a decode worker that is scaled in, or told to end, and its streams move on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from raw_client import RawClient
from served import Served
from tiny_models import make_llama_folder

from legato.protos import cluster_pb2, common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

NUM_STREAMS = 16
NUM_TOKENS = 900
WAIT_S = 240.0


@dataclass(frozen=True)
class Whole:
    token_ids: list[int]
    finish: generation_pb2.Finish
    ended_at_s: float


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("moves")
    # Its steps take longer than what router and clients do with their tokens.
    model = make_llama_folder(
        folder / "small",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        max_position_embeddings=1024,
    )
    words = ("--model", str(model), "--kv-memory", "320MiB", "--threads", "1", "--decode", "2")
    with Served(folder / "serve.log", *words) as service:
        yield service


async def ask(client: RawClient, number: int) -> Whole:
    """Half of them sampled."""
    request = generation_pb2.GenerateRequest(
        text=f"prompt number {number}",
        sampling=common_pb2.SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=0.8 * (number % 2),
            seed=number,
            ignore_eos=True,
        ),
    )
    token_ids: list[int] = []
    async for response in client.generate(request, timeout_s=WAIT_S):
        assert response.HasField("finish") or response.delta.token_offset == len(token_ids)
        token_ids += response.delta.token_ids
    assert response.finish.usage.completion_tokens == len(token_ids) == NUM_TOKENS
    return Whole(token_ids, response.finish, time.monotonic())


@pytest.fixture(scope="module")
def alone(served: Served) -> list[list[int]]:
    """Their answers where nothing moves."""

    async def answers() -> list[Whole]:
        async with RawClient(served.address) as client:
            return await asyncio.gather(*(ask(client, n) for n in range(NUM_STREAMS)))

    wholes = asyncio.run(answers())
    assert all(whole.finish.timings.moves == 0 for whole in wholes)
    return [whole.token_ids for whole in wholes]


async def decode_workers(client: RawClient) -> list[cluster_pb2.WorkerStatus]:
    return list((await client.status()).pools[1].workers)


async def wait_for(client: RawClient, num_decodes: int, without: str = "") -> None:
    """So many decode workers are there, each ready, and that one is gone."""
    async with asyncio.timeout(WAIT_S):
        while True:
            pool = (await client.status()).pools[1]
            ids = [worker.worker_id for worker in pool.workers]
            if pool.ready == len(ids) == num_decodes and without not in ids:
                return
            await asyncio.sleep(0.02)


async def begin(client: RawClient) -> list[asyncio.Task[Whole]]:
    """Most of them run, and all together have come some way."""
    before = {w.worker_id: w.load.decode_tokens for w in await decode_workers(client)}
    streams = [asyncio.create_task(ask(client, n)) for n in range(NUM_STREAMS)]
    async with asyncio.timeout(WAIT_S):
        while True:
            workers = await decode_workers(client)
            made = sum(w.load.decode_tokens - before[w.worker_id] for w in workers)
            num_running = sum(w.load.running for w in workers)
            if num_running >= NUM_STREAMS * 3 // 4 and made > 40 * NUM_STREAMS:
                return streams
            done = [stream.result() for stream in streams if stream.done()]
            assert not done, f"{num_running} run, {len(done)} have ended already"
            await asyncio.sleep(0.02)


async def check(streams: list[asyncio.Task[Whole]], alone: list[list[int]]) -> list[Whole]:
    """One whose client reads too slowly for a move is computed anew at the end of the drain, which
    is right as well: on a crowded machine all of them do.
    """
    answers = await asyncio.wait_for(asyncio.gather(*streams), WAIT_S)
    assert [answer.token_ids for answer in answers] == alone
    for answer in answers:
        assert answer.finish.timings.attempts == 1
    return answers


def was_computed_anew(answer: Whole) -> bool:
    """Then a prefill took the place of a decode forward."""
    return answer.finish.timings.decode_forwards < NUM_TOKENS - 1


async def test_scale_in_moves_the_running_streams(served: Served, alone: list[list[int]]) -> None:
    async with RawClient(served.address) as client:
        await wait_for(client, 2)
        moved_before = (await client.status()).router.moved_with_kv
        streams = await begin(client)
        newest = (await decode_workers(client))[-1]
        num_there = newest.load.running
        began_s = time.monotonic()
        await client.scale({"decode": 1})
        await wait_for(client, 1, without=newest.worker_id)
        drained_s = time.monotonic() - began_s
        num_running = sum(not stream.done() for stream in streams)
        answers = await check(streams, alone)
        needed_s = max(answer.ended_at_s for answer in answers) - began_s
        moves = sum(answer.finish.timings.moves for answer in answers)
        status = (await client.status()).router
        num_anew = sum(map(was_computed_anew, answers))
        print(
            f"{num_there} streams on the worker, {moves} moved, {num_anew} computed anew, "
            f"gone after {drained_s:.2f} s; "
            f"the streams ran for {needed_s:.2f} s, {num_running} of them beyond the drain"
        )
        assert num_there >= NUM_STREAMS // 4
        assert moves >= num_there // 2
        assert status.moved_with_kv - moved_before == moves
        assert status.failed == 0
        assert num_running > 0
        assert drained_s < needed_s
        await client.scale({"decode": 2})
        await wait_for(client, 2)
        served.note_descendants()


@pytest.mark.parametrize("num_decodes", [2, 1])
async def test_a_worker_that_is_told_to_end_is_replaced_and_loses_nothing(
    served: Served, alone: list[list[int]], num_decodes: int
) -> None:
    """With one alone, its streams move to the one that takes its place."""
    async with RawClient(served.address) as client:
        await client.scale({"decode": num_decodes})
        await wait_for(client, num_decodes)
        streams = await begin(client)
        worker = (await decode_workers(client))[0]
        began_s = time.monotonic()
        os.kill(worker.pid, signal.SIGTERM)
        await wait_for(client, num_decodes, without=worker.worker_id)
        replaced_s = time.monotonic() - began_s
        answers = await check(streams, alone)
        moves = sum(answer.finish.timings.moves for answer in answers)
        needed_s = max(answer.ended_at_s for answer in answers) - began_s
        status = (await client.status()).router
        num_anew = sum(map(was_computed_anew, answers))
        print(
            f"of {num_decodes}: {moves} moved, {num_anew} computed anew, "
            f"replaced after {replaced_s:.2f} s; the streams ran "
            f"for {needed_s:.2f} s"
        )
        assert moves > 0
        assert status.failed == 0
        served.note_descendants()
