"""Workers change their role under load: no stream fails, is cut or differs; no weights are read."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from raw_client import BlockingRawClient
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
NUM_CLIENTS = 8
NUM_PROMPTS = 16
MAX_TOKENS = 200
NUM_PROBES = 6
MIN_STREAMS = 40
SERVES_WITHIN_S = 2.0


@dataclass
class Stream:
    """One answer that a client read to its end."""

    prompt: int
    token_ids: list[int]
    first_at_s: float  # prefill's token
    second_at_s: float  # decode's first
    prefill_worker: str
    decode_worker: str


class Load:
    """Clients that ask one request after the other until `end`."""

    def __init__(self, address: str) -> None:
        self._client = BlockingRawClient(address)
        self._ended = threading.Event()
        self._prompts = itertools.count()
        self._threads = ThreadPoolExecutor(NUM_CLIENTS)
        self.streams: list[Stream] = []
        self._running = [self._threads.submit(self._ask_on) for _ in range(NUM_CLIENTS)]

    def end(self) -> None:
        """Raises what any of the streams raised."""
        self._ended.set()
        for running in self._running:
            running.result(120)
        self._threads.shutdown()
        self._client.close()

    def _ask_on(self) -> None:
        while not self._ended.is_set():
            self.streams.append(ask(self._client, next(self._prompts) % NUM_PROMPTS))


def ask(client: BlockingRawClient, prompt: int, max_tokens: int = MAX_TOKENS) -> Stream:
    seeded = prompt % 2 == 1
    request = generation_pb2.GenerateRequest(
        text=f"prompt {prompt} " * (1 + prompt),
        sampling=common_pb2.SamplingParams(
            max_tokens=max_tokens,
            temperature=0.8 if seeded else 0.0,
            seed=prompt,
            ignore_eos=True,
        ),
    )
    token_ids: list[int] = []
    times: list[float] = []
    for response in client.generate(request, timeout_s=120):
        if response.HasField("delta"):
            assert response.delta.token_offset == len(token_ids), "a token was lost or doubled"
            token_ids += response.delta.token_ids
            times.append(time.monotonic())
        else:
            finish = response.finish
    assert finish.usage.completion_tokens == len(token_ids) == max_tokens
    workers = finish.timings.prefill_worker, finish.timings.decode_worker
    return Stream(prompt, token_ids, times[0], times[1], *workers)


def wait_for_successor(client: BlockingRawClient, worker_id: str) -> tuple[str, float]:
    """The id of the worker that `worker_id` has become, and when it was seen to be ready."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for pool in client.status().pools:
            for worker in pool.workers:
                ready = worker.phase == common_pb2.WORKER_PHASE_READY
                if worker.predecessor == worker_id and ready:
                    return worker.worker_id, time.monotonic()
        time.sleep(0.02)
    raise AssertionError(f"{worker_id} did not become anything")


def until_served_by(client: BlockingRawClient, worker_id: str) -> float:
    """When the first token came that the worker made. Of requests at the same moment some go to it,
    however little the others have to do.
    """
    deadline_s = time.monotonic() + 60
    with ThreadPoolExecutor(NUM_PROBES) as threads:
        while time.monotonic() < deadline_s:
            streams = list(threads.map(lambda i: ask(client, i, max_tokens=2), range(NUM_PROBES)))
            times = [s.first_at_s for s in streams if s.prefill_worker == worker_id]
            times += [s.second_at_s for s in streams if s.decode_worker == worker_id]
            if times:
                return min(times)
    raise AssertionError(f"{worker_id} served nobody")


def pids(client: BlockingRawClient) -> dict[str, int]:
    return {w.worker_id: w.pid for pool in client.status().pools for w in pool.workers}


def test_roles_flip_both_ways_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=1024)
    words = ("--model", str(model), "--prefill", "2", "--decode", "2", "--kv-memory", "16MiB")
    # Else decode workers compute prompts as short as these, and prefill workers have nothing to do.
    words = (*words, "--threads", "1", "--local-prefill-tokens", "0")
    served = Served(tmp_path / "serve.log", *words)
    with served, BlockingRawClient(served.address) as client:
        alone = [ask(client, prompt).token_ids for prompt in range(NUM_PROMPTS)]
        processes = set(pids(client).values())
        shutil.rmtree(model)  # from here on nothing can be loaded
        load = Load(served.address)
        late_s = []
        for number, new_role in enumerate((DECODE, PREFILL, PREFILL, DECODE)):
            while len(load.streams) < (number + 1) * MIN_STREAMS // 4:  # before, and between flips
                time.sleep(0.05)
            old_role = PREFILL if new_role == DECODE else DECODE
            [pool] = [pool for pool in client.status().pools if pool.role == old_role]
            old = pool.workers[0].worker_id
            if number == 0:
                name = "decode" if new_role == DECODE else "prefill"
                done = legato("role", old[:16], name, "--address", served.address)
                assert done.returncode == 0, done.stderr
            else:
                change(served.address, old, new_role)
            new, ready_s = wait_for_successor(client, old)
            late_s.append(max(0.0, until_served_by(client, new) - ready_s))
            assert old not in pids(client)
        load.end()
        status = client.status()
        assert set(pids(client).values()) == processes, "a worker was started anew"
        served.note_descendants()
    assert len(load.streams) >= MIN_STREAMS
    assert [s for s in load.streams if s.token_ids != alone[s.prompt]] == []
    assert (status.router.failed, status.router.refused, status.router.cancelled) == (0, 0, 0)
    with capsys.disabled():
        print(
            f"\n4 flips, {len(load.streams)} streams: 0 failed, {status.router.moved} moved; "
            f"first token after {', '.join(f'{s:.2f}' for s in late_s)} s of being ready"
        )
    assert max(late_s) <= SERVES_WITHIN_S


def change(address: str, worker_id: str, role: common_pb2.WorkerRole.ValueType) -> None:
    with grpc.insecure_channel(address) as channel:
        request = cluster_pb2.ChangeRoleRequest(worker_id=worker_id, role=role)
        cluster_pb2_grpc.ClusterStub(channel).ChangeRole(request, timeout=10)
