"""One service over several Ray nodes with addresses of their own: where workers go, and what the
loss of a whole node costs.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from raw_client import RawClient
from ray_nodes import RayNodes
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from legato.protos import cluster_pb2

pytestmark = pytest.mark.integration

NUM_STREAMS = 48
NUM_TOKENS = 500
NOTICE_S = 5.0  # far below Ray's own 15 s
SMALL = ("--kv-memory", "64MiB", "--threads", "1", "--context-length", "1024")
PLACES = (
    "--prefill-resources",
    "prefill_node=1,label:pool=prefill",
    "--decode-resources",
    "decode_node=1,label:pool=!prefill",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[RayNodes, str, list[str]]]:
    """A head without room for workers, one prefill node, two decode nodes for two workers each."""
    with RayNodes() as nodes:
        prefill = nodes.add({"prefill_node": 1}, {"pool": "prefill"})
        yield nodes, prefill, [nodes.add({"decode_node": 2}, {"pool": "decode"}) for _ in range(2)]


@dataclass
class Answer:
    """One stream as it came."""

    number: int
    tokens: list[int]
    finish: generation_pb2.Finish | None = None

    async def read(self, client: RawClient) -> None:
        """To its end; every second one is greedy, the others draw by a seed."""
        greedy = self.number % 2 == 0
        request = generation_pb2.GenerateRequest(
            text=f"prompt {self.number} " * (1 + self.number % 7),
            sampling=common_pb2.SamplingParams(
                max_tokens=NUM_TOKENS,
                temperature=0.0 if greedy else 1.0,
                seed=self.number,
                ignore_eos=True,
            ),
        )
        async for response in client.generate(request, timeout_s=120):
            assert self.finish is None, "nothing comes after the finish"
            if response.HasField("finish"):
                self.finish = response.finish
            else:
                assert response.delta.token_offset == len(self.tokens), "a token lost or doubled"
                self.tokens += response.delta.token_ids


async def run_load(client: RawClient, disturb: Callable[[], None] | None = None) -> list[Answer]:
    """All streams to their ends; `disturb` is called once each of them has begun and none ended."""
    answers = [Answer(number, []) for number in range(NUM_STREAMS)]
    reading = [asyncio.create_task(answer.read(client)) for answer in answers]
    if disturb is not None:
        await until(lambda: all(len(answer.tokens) > 1 for answer in answers), 60)
        assert not any(answer.finish for answer in answers), "a stream was over before the loss"
        await asyncio.to_thread(disturb)
    await asyncio.gather(*reading)
    return answers


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def decode_pool(
    client: RawClient, condition: Callable[[cluster_pb2.PoolStatus], bool], timeout_s: float
) -> cluster_pb2.PoolStatus:
    """The decode pool's status, once `condition` holds."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        pool = (await client.status()).pools[1]
        if condition(pool):
            return pool
        assert time.monotonic() < deadline_s, pool
        await asyncio.sleep(0.05)


def hosts(pool: cluster_pb2.PoolStatus) -> list[str]:
    return sorted(w.address.rpartition(":")[0] for w in pool.workers if w.address)


async def test_a_lost_node_costs_no_stream_and_its_workers_come_back_elsewhere(
    cluster: tuple[RayNodes, str, list[str]], model: Path, tmp_path: Path
) -> None:
    nodes, prefill_node, decode_nodes = cluster
    words = ("--model", str(model), "--ray-address", nodes.address, "--decode", "2", *PLACES)
    with Served(tmp_path / "log", *words, *SMALL, env=nodes.env) as service:
        async with RawClient(service.address) as client:
            prefill, decode = (await client.status()).pools
            assert hosts(prefill) == [prefill_node]
            assert set(hosts(decode)) <= set(decode_nodes)
            # Ray spreads workers that start at once over the nodes as well as it can: both may be
            # on one, and then that one is lost.
            lost, num_lost = hosts(decode)[0], hosts(decode).count(hosts(decode)[0])
            (kept,) = (node for node in decode_nodes if node != lost)
            undisturbed = await run_load(client)
            lost_s: list[float] = []

            def lose_a_node() -> None:
                lost_s.append(time.monotonic())
                nodes.kill(lost)

            load = asyncio.create_task(run_load(client, lose_a_node))
            await until(lambda: bool(lost_s), 90)
            gone = await decode_pool(client, lambda pool: lost not in hosts(pool), 30)
            noticed_s = time.monotonic() - lost_s[0]
            assert noticed_s < NOTICE_S, gone
            # Not on the lost node, of which Ray does not know yet that it is gone.
            back = await decode_pool(client, lambda pool: pool.ready == 2, 60)
            restored_s = time.monotonic() - lost_s[0]
            assert (hosts(back), back.message) == ([kept] * 2, "")
            started = nodes.logged(r"worker (decode-\d+) starts")
            names = [f"decode-{1 + number}" for number in range(2 + num_lost)]
            assert started == names, "one was sent to a lost node"
            assert "failed starts" not in gone.message
            disturbed = await load
            finishes = [answer.finish for answer in disturbed if answer.finish is not None]
            moved = sum(finish.timings.attempts > 1 for finish in finishes)
            print(
                f"{len(finishes)} of {NUM_STREAMS} streams ended, {moved} of them moved; loss "
                f"noticed within {noticed_s:.2f} s, made good within {restored_s:.2f} s"
            )
            assert len(finishes) == NUM_STREAMS
            assert moved >= NUM_STREAMS // 8, "the lost node had too few streams for a test"
            assert [a.tokens for a in disturbed] == [a.tokens for a in undisturbed]
            # A third has no room, until there is a node for it.
            await client.scale({"decode": 3})
            waiting = await decode_pool(client, lambda pool: "waiting" in pool.message, 10)
            assert waiting.message == (
                "2 of 3 ready; 1 starting; waiting for room: a decode worker needs decode_node=1; "
                "the most free on one node is decode_node=0 of 2"
            )
            added = nodes.add({"decode_node": 1})
            full = await decode_pool(client, lambda pool: pool.ready == 3, 60)
            assert hosts(full) == sorted([kept, kept, added])
        ended = legato("stop", "--address", service.address)
        assert (ended.returncode, ended.stdout) == (0, "stopped\n")
        assert service.process.wait(60) == 0
    assert "Traceback" not in service.output


NO_NODE_HAS = {
    "fast_gpu=1,CPU=2": (
        "no node of the cluster can hold a decode worker, which needs CPU=2, fast_gpu=1: the most "
        "on any node is fast_gpu=0"
    ),
    "label:zone=nowhere": (
        "no node of the cluster can hold a decode worker, which needs CPU=1, label:zone=nowhere: "
        "none has label:zone=nowhere"
    ),
}


def test_what_no_node_has_is_said_at_once_and_ends_the_start(
    cluster: tuple[RayNodes, str, list[str]], model: Path
) -> None:
    nodes, _, _ = cluster
    words = ("serve", "--port", "0", "--model", str(model), "--ray-address", nodes.address, *SMALL)

    def start(asked: str) -> subprocess.CompletedProcess[str]:
        return legato(*words, "--decode-resources", asked, env=nodes.env)

    started_s = time.monotonic()
    with ThreadPoolExecutor(len(NO_NODE_HAS)) as threads:
        ended = list(threads.map(start, NO_NODE_HAS))
    took_s = time.monotonic() - started_s
    for failed, told in zip(ended, NO_NODE_HAS.values(), strict=True):
        assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, f"legato: {told}")
        assert f"0 of 1 ready; 1 starting; waiting for a node: {told}" in failed.stderr
        assert "Traceback" not in failed.stderr
    assert took_s < 60, took_s  # 20 s of them for a node that may just be joining
