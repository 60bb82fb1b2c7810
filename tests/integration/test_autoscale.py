"""Pools that grow under load and shrink after it, in real processes; no request notices."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest
from raw_client import BlockingRawClient
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

NUM_STREAMS = 12
BLOCK_BYTES = 16 * 2 * 3 * 2 * 16 * 4  # of the tiny model: K, V, 3 layers, 2 heads, 16 floats
AUTOSCALE = (
    *("--autoscale", "prefill=1..2", "decode=1..3"),
    *("--ttft-slo", "500ms", "--itl-slo", "10s"),
    *("--autoscale-up-after", "1s", "--autoscale-down-after", "6s", "--autoscale-cool-down", "2s"),
)


class Streams:
    """Asks without a pause until told to end, and counts."""

    def __init__(self, address: str) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._ending = threading.Event()
        self._address = address
        self._threads = ThreadPoolExecutor(NUM_STREAMS)
        self._runs = [self._threads.submit(self._run, number) for number in range(NUM_STREAMS)]

    def end(self) -> None:
        """The running ones finish first."""
        self._ending.set()
        for run in self._runs:
            run.result(timeout=120)
        self._threads.shutdown()

    def _run(self, number: int) -> None:
        with BlockingRawClient(self._address) as client:
            while not self._ending.is_set():
                message = generation_pb2.GenerateRequest(
                    text=f"stream {number}",
                    sampling=common_pb2.SamplingParams(
                        max_tokens=400, temperature=0.0, ignore_eos=True
                    ),
                )
                try:
                    responses = list(client.generate(message, timeout_s=120))
                except grpc.RpcError as error:
                    self.failures.append(str(error))
                    continue
                tokens = [t for r in responses for t in r.delta.token_ids]
                if len(tokens) != 400:
                    self.failures.append(f"{len(tokens)} tokens")
                self.num_answers += 1


def wait_for(what: Callable[[], bool], timeout_s: float, client: BlockingRawClient) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, client.status()
        time.sleep(0.2)


def test_decode_grows_under_load_and_shrinks_after_it(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny", max_position_embeddings=512)
    # Room for four answers at a time: the others wait for it.
    room = ("--kv-memory", str(112 * BLOCK_BYTES), "--swap-memory", "0", "--threads", "1")
    with (
        Served(tmp_path / "log", "--model", str(folder), *room, *AUTOSCALE) as served,
        BlockingRawClient(served.address) as client,
    ):

        def ready_decode() -> int:
            return client.status().pools[1].ready

        streams = Streams(served.address)
        began_s = time.monotonic()
        try:
            wait_for(lambda: ready_decode() >= 2, 60, client)
        finally:
            print("grew", time.monotonic() - began_s)
            streams.end()
        print("ended", time.monotonic() - began_s)
        assert streams.failures == []
        wait_for(lambda: len(client.status().pools[1].workers) == 1, 60, client)
        status = client.status()
        assert (status.router.failed, status.router.refused) == (0, 0)
        assert status.router.completed == streams.num_answers > NUM_STREAMS
        decided = [decision.text for decision in status.autoscaler.decisions]
        print(streams.num_answers, *status.autoscaler.decisions, sep="\n")
        assert decided[0].startswith("decode 1 -> 2: ")
        assert any(text.startswith("decode 2 -> 1: ") for text in decided)

        table = legato("status", "--address", served.address).stdout
        assert "autoscaler: prefill 1..2, decode 1..3; goals: TTFT 500 ms, ITL 10000 ms" in table
        assert "s ago: decode 1 -> 2: " in table

        beyond = legato("scale", "decode=4", "--address", served.address)
        assert beyond.returncode == 2
        told = "legato: decode is 4, limit [1, 3]: the decode pool is autoscaled"
        assert beyond.stderr.startswith(told)
        within = legato("scale", "decode=2", "--address", served.address)
        assert within.stdout.strip() == "target: prefill 1, decode 2", within.stderr
