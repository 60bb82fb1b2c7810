"""`legato serve --colocated` as a user starts it, and workers that change to and from that role."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest
from raw_client import BlockingRawClient
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import cluster_pb2, common_pb2, generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

COLOCATED, DECODE = common_pb2.WORKER_ROLE_COLOCATED, common_pb2.WORKER_ROLE_DECODE


def ask(
    client: BlockingRawClient, max_tokens: int = 20
) -> tuple[list[int], generation_pb2.Timings]:
    request = generation_pb2.GenerateRequest(
        text="hello there, " * 20,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
    responses = list(client.generate(request, timeout_s=60))
    ids = [token for response in responses for token in response.delta.token_ids]
    assert len(ids) == max_tokens
    return ids, responses[-1].finish.timings


def pool_of(client: BlockingRawClient, role: int) -> cluster_pb2.PoolStatus:
    return next(pool for pool in client.status().pools if pool.role == role)


def wait_for(client: BlockingRawClient, role: int, size: int) -> list[str]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        pool = pool_of(client, role)
        if len(pool.workers) == pool.ready == size:
            return [worker.worker_id for worker in pool.workers]
        time.sleep(0.05)
    raise AssertionError(pool)


def test_two_colocated_workers_are_a_service_and_change_their_roles(tmp_path: Path) -> None:
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=1024)
    words = ("--model", str(model), "--prefill", "0", "--decode", "0", "--colocated", "2")
    served = Served(tmp_path / "serve.log", *words, "--kv-memory", "16MiB", "--threads", "1")
    at = ("--address", served.address)
    with served, BlockingRawClient(served.address) as client:
        answer, timings = ask(client)
        assert timings.prefill_worker == timings.decode_worker
        assert timings.kv_bytes_handed_over == 0
        assert ask(client, 1)[0] == answer[:1]
        status = legato("status", *at)
        assert status.returncode == 0
        assert "colocated: 2 of 2 ready" in status.stdout
        assert "prefill: " not in status.stdout

        scaled = legato("scale", "prefill=1", "--wait", "60", *at)
        assert scaled.returncode == 0, scaled.stderr
        assert scaled.stdout == "target: prefill 1, decode 0, colocated 2\n"
        shutil.rmtree(model)  # from here on nothing can be loaded
        first, second = wait_for(client, COLOCATED, 2)
        flipped = legato("role", first, "decode", *at)
        assert flipped.returncode == 0, flipped.stderr
        [decode] = wait_for(client, DECODE, 1)
        assert wait_for(client, COLOCATED, 1) == [second]
        last = legato("role", second[:14], "decode", *at)
        assert last.returncode == 1
        assert "last ready worker of the colocated pool" in last.stderr

        # Now a pair and a colocated worker; then the pair alone.
        assert ask(client)[0] == answer
        assert legato("scale", "colocated=0", "--wait", "60", *at).returncode == 0
        after, timings = ask(client)
        assert (after, timings.decode_worker) == (answer, decode)
        assert "colocated: " not in legato("status", *at).stdout
        assert client.status().router.failed == 0
        served.note_descendants()
