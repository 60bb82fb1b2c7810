"""Loss of the head of a cluster that the service has joined: Ray's processes wait 60 s for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from ray_nodes import RayNodes
from served import Served
from tiny_models import make_llama_folder
from workload import again, mixed, record_stream

from legato.cluster.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from history import CallHistory

    from legato.protos import generation_pb2

pytestmark = pytest.mark.integration

NUM_STREAMS, NUM_TOKENS = 12, 400
TIMEOUT_S = 50.0  # less than Ray waits
TOLD_WITHIN_S = 30.0
SMALL = ("--kv-memory", "32MiB", "--threads", "1", "--worker-cpus", "1")


async def test_running_streams_end_and_new_ones_are_served(tmp_path: Path) -> None:
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=1024)
    requests = mixed(NUM_STREAMS, seed=4, longest_prompt=60)
    for request in requests:
        request.sampling.max_tokens = NUM_TOKENS
    with RayNodes() as nodes:
        words = ("--model", str(model), "--ray-address", nodes.address, *SMALL)
        served = Served(tmp_path / "log", *words, env=nodes.env)
        try:
            async with AsyncClient(served.address) as client:
                await see_the_head_lost(nodes, client, requests)
            told = "Ray's head (gcs_server) does not answer: what runs serves on"
            async with asyncio.timeout(TOLD_WITHIN_S):
                while told not in served.output:  # noqa: ASYNC110  # another process's
                    await asyncio.sleep(0.2)
        finally:  # its own end would wait for the head
            served.process.kill()
            served.process.wait()


async def see_the_head_lost(
    nodes: RayNodes, client: AsyncClient, requests: Sequence[generation_pb2.GenerateRequest]
) -> None:
    begun: set[str] = set()
    ended: set[str] = set()

    async def read(name: str) -> list[CallHistory]:
        calls = (
            record_stream(
                client,
                again(request, name),
                timeout_s=TIMEOUT_S,
                seen=lambda call: begun.add(call.request_id),
            )
            for request in requests
        )
        tasks = [asyncio.create_task(call) for call in calls]
        for task in tasks:
            task.add_done_callback(lambda done: ended.add(done.result().request_id))
        return await asyncio.gather(*tasks)

    def tokens(calls: list[CallHistory]) -> list[list[int]]:
        assert [call.error for call in calls] == [""] * len(calls)
        return [call.token_ids(i) for call in calls for i in range(call.num_answers)]

    alone = tokens(await read(" alone"))
    begun.clear()
    ended.clear()
    reading = asyncio.create_task(read(" amid"))
    async with asyncio.timeout(TIMEOUT_S):
        while len(begun) < len(requests):  # noqa: ASYNC110  # set by many
            await asyncio.sleep(0.005)
    assert not ended, "too little load"
    nodes.kill_head()
    assert tokens(await reading) == alone
    assert tokens(await read(" after")) == alone
    async with asyncio.timeout(TOLD_WITHIN_S):
        while "Ray's head" not in (await client.status()).pools[1].message:  # noqa: ASYNC110  # remote
            await asyncio.sleep(0.2)
    assert (await client.status()).ready
