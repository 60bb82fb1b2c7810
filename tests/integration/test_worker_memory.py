"""A worker takes at most 400 MB beside its weights and its KV pool, idle and after long prompts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import pytest
import torch
import worker_pair
from demo_model import demo_model_path
from worker_pair import Attempt, Pair, Worker, sampling
from worker_process import WorkerProcess, worker_process

from legato.bench.loaded_cost import loaded_cost
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.config import WorkerConfig
from legato.worker.loading import load_model
from legato.worker.spare_memory import give_back_code

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
KV_BYTES = 64 << 20
BESIDES_BYTES = 360_000_000  # measured: 280; the rest of 400 is left to other systems
PROMPT_TOKENS = 2000
# As the file has them, and as floats; floats of two bytes differ from those of four in size alone.
KINDS = [("keep", "bfloat16"), ("auto", "float32")]
if os.environ.get("LEGATO_MEMORY") == "full":
    KINDS.append(("auto", "bfloat16"))


def client(worker: WorkerProcess) -> Worker:
    channel = grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS)
    return Worker(None, None, worker.address, channel)  # type: ignore[arg-type]  # no server here


def rss_bytes(pid: int) -> int:
    """All resident pages, those of shared libraries included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("weights", "dtype"), KINDS)
async def test_a_worker_stays_within_its_memory(
    monkeypatch: pytest.MonkeyPatch, weights: str, dtype: str
) -> None:
    monkeypatch.setattr(worker_pair, "WAIT_S", 120.0)
    model = demo_model_path()
    config = WorkerConfig(
        model=str(model), role="decode", device="cpu", weights=weights, dtype=dtype
    )
    limit = loaded_cost(load_model(config).model, 0).weight_bytes + KV_BYTES + BESIDES_BYTES
    options = ("--weights", weights, "--dtype", dtype, "--device", "cpu")
    pool = ("--kv-cache", "int8", "--kv-memory", str(KV_BYTES))
    with (
        worker_process(model, "prefill", *options, *pool) as p,
        worker_process(model, "decode", *options, *pool) as d,
    ):
        pids = {"prefill": p.pid, "decode": d.pid}
        idle = {role: rss_bytes(pid) for role, pid in pids.items()}
        pair = Pair(client(p), client(d))
        prompt = [(i * 37 + 5) % 40_000 for i in range(PROMPT_TOKENS)]
        for _ in range(2):  # the second finds the arena grown
            assert len(await Attempt(pair, prompt, sampling(8)).run()) == 8
        after = {role: rss_bytes(pid) for role, pid in pids.items()}
        for one in (pair.p, pair.d):
            await one.channel.close()
    for role in pids:
        assert max(idle[role], after[role]) <= limit, (role, idle, after, limit)


def test_libraries_work_when_their_pages_were_given_back() -> None:
    before = rss_bytes(os.getpid())
    give_back_code()
    assert rss_bytes(os.getpid()) < before - (10 << 20)
    # Torch's code comes back as it is called.
    assert torch.linspace(0, 1, 1000).sin().sort().values.argmax() == 999
