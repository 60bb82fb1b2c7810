"""Workers as processes of their own: real weights, real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from moving import Moving
from tiny_models import make_llama, make_llama_folder
from worker_pair import Attempt, Pair, Worker, sampling
from worker_process import WorkerProcess, command, environment, worker_process

from legato.protos import common_pb2, worker_pb2
from legato.worker.channel import CHANNEL_OPTIONS

pytestmark = pytest.mark.integration
POOL = ("--kv-memory", "4MiB", "--prefill-chunk-tokens", "16")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("worker") / "model")


def client(worker: WorkerProcess) -> Worker:
    channel = grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS)
    return Worker(None, None, worker.address, channel)  # type: ignore[arg-type]  # no server here


async def idle(worker: Worker) -> bool:
    watch = worker.control.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=20)
    async for report in watch:
        load: common_pb2.WorkerLoad = report.load
        if load.free_blocks == load.total_blocks and not load.transferring:
            watch.cancel()
            return True
    return False


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    model = make_llama()
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return [int(i) for i in ids[0, len(prompt) :]]


async def test_two_processes_answer_like_transformers(model_folder: Path) -> None:
    with (
        worker_process(model_folder, "prefill", *POOL) as p,
        worker_process(model_folder, "decode", *POOL, "--block-size", "8") as d,
    ):
        pair = Pair(client(p), client(d))
        health = health_pb2_grpc.HealthStub(pair.p.channel)
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        for length in (1, 15, 16, 17, 40):
            prompt = [(i * 37 + 5) % 256 for i in range(length)]
            answer = await Attempt(pair, prompt, sampling(20)).run()
            assert answer == greedy(prompt, 20), length
        assert await idle(pair.p)
        assert await idle(pair.d)
        for worker in (p, d):
            worker.signal(signal.SIGTERM)
        assert (p.wait(), d.wait()) == (0, 0)
        for one in (pair.p, pair.d):
            await one.channel.close()


async def test_sigterm_lets_a_running_answer_finish(model_folder: Path) -> None:
    prompt = [1, 2, 3]
    with (
        worker_process(model_folder, "prefill", *POOL) as p,
        worker_process(model_folder, "decode", *POOL) as d,
    ):
        pair = Pair(client(p), client(d))
        attempt = Attempt(pair, prompt, sampling(300))
        run = asyncio.create_task(attempt.run())
        async with asyncio.timeout(60):
            while len(attempt.tokens) < len(prompt) + 10:  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.001)
        d.signal(signal.SIGSTOP)  # so that what has come is all that it made before SIGTERM
        await asyncio.sleep(0.2)
        num_tokens = len(attempt.tokens) - len(prompt)
        d.signal(signal.SIGTERM)
        d.signal(signal.SIGCONT)
        assert num_tokens < 300, "the answer was over before the signal"
        assert await run == greedy(prompt, 300)
        assert await asyncio.to_thread(d.wait) == 0
        for one in (pair.p, pair.d):
            await one.channel.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_stopped_decode_worker_is_noticed(
    model_folder: Path, number: signal.Signals
) -> None:
    with (
        worker_process(model_folder, "prefill", *POOL) as p,
        worker_process(model_folder, "decode", *POOL) as d,
    ):
        pair = Pair(client(p), client(d))
        attempt = Attempt(pair, [1, 2, 3], sampling(100))
        await attempt.reserve()
        d.signal(number)
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()  # within its own bound: keepalive, or no progress
        assert event.handoff_failed.decode_lost
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await attempt.decode_call.read()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await idle(pair.p)
        for one in (pair.p, pair.d):
            await one.channel.close()


def failing_start(*arguments: str) -> str:
    done = subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_what_cannot_start_says_so_in_one_line(model_folder: Path, tmp_path: Path) -> None:
    missing = failing_start(*command(tmp_path / "nothing", "decode"))
    assert "cannot start" in missing
    assert "nothing" in missing
    assert "Traceback" not in missing
    small = failing_start(*command(model_folder, "decode", "--kv-memory", "100B"))
    assert "kv_memory_bytes 100" in small
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = failing_start(*command(model_folder, "decode", "--port", port))
    assert f"cannot listen on 127.0.0.1:{port}" in message


def test_a_worker_dies_with_its_parent(model_folder: Path) -> None:
    parent = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "assert 'ready' in child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent, *command(model_folder, "decode", *POOL)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=90,
        check=True,
    )
    pid = int(done.stdout)
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return  # dead; whoever adopted it has not reaped it yet
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the worker outlived its parent")


async def test_a_worker_that_is_told_to_end_says_so_and_goes_when_its_stream_has_moved(
    model_folder: Path,
) -> None:
    with (
        worker_process(model_folder, "prefill", *POOL) as p,
        worker_process(model_folder, "decode", *POOL) as a,
        worker_process(model_folder, "decode", *POOL) as b,
    ):
        prefill, leaving, other = client(p), client(a), client(b)
        prompt = [(i * 37 + 5) % 256 for i in range(20)]
        moving = Moving(prefill, prompt, sampling(400, ignore_eos=True))
        stay = await moving.begin(leaving)
        a.signal(signal.SIGTERM)
        watch = leaving.control.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=20)
        async for report in watch:
            if report.phase == common_pb2.WORKER_PHASE_DRAINING:
                watch.cancel()
                break
        health = health_pb2_grpc.HealthStub(leaving.channel)
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stay.pause()
        assert await stay.parked() is not None, "it was over before"
        onward, moved = await moving.moved(stay, other)
        assert moved.kv_bytes > 0
        assert a.wait(20) == 0
        await onward.to_the_end()
        moving.note(onward)
        assert moving.tokens == greedy(prompt, 400)
        moving.close()
        assert await idle(other)


async def test_told_twice_it_ends_at_once(model_folder: Path) -> None:
    with (
        worker_process(model_folder, "prefill", *POOL) as p,
        worker_process(model_folder, "decode", *POOL) as d,
    ):
        moving = Moving(client(p), [1, 2, 3], sampling(400, ignore_eos=True))
        stay = await moving.begin(client(d))
        await stay.pause()
        assert await stay.parked() is not None
        d.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert d.process.poll() is None, "it has something left"
        d.signal(signal.SIGTERM)
        assert d.wait(20) == 130
        moving.close()
