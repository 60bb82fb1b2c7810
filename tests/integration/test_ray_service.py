"""The whole service as a user starts it: Ray, router, controller and workers in processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray_head import TOKEN, ray_head
from served import END_TIMEOUT_S, START_TIMEOUT_S, Served, legato, runs
from tiny_models import make_llama_folder

from legato.cluster.client import Client, Tokens
from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

READY = common_pb2.WORKER_PHASE_READY
DRAINING = common_pb2.WORKER_PHASE_DRAINING
SMALL = ("--kv-memory", "16MiB", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A long context: an answer can outlast the start of a command.
    folder = tmp_path_factory.mktemp("ray") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(log, "--model", str(model), *SMALL) as service:
        yield service


def ask(client: Client, text: str, max_tokens: int) -> list[int]:
    result = client.generate(
        text, timeout_s=120, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )
    assert result.answers[0].finish.usage.completion_tokens == max_tokens
    return result.token_ids


def wait_for(client: Client, prefill: int, decode: int) -> None:
    """By the controller and by the router, which learns of a new worker a moment later."""
    deadline_s = time.monotonic() + 90
    while True:
        pools = client.status().pools
        known = [p.workers and all(w.phase == READY for w in p.workers) for p in pools]
        sizes = [(len(p.workers), p.ready) for p in pools]
        if all(known) and sizes == [(prefill, prefill), (decode, decode)]:
            return
        assert time.monotonic() < deadline_s, pools
        time.sleep(0.1)


def test_answers_come_from_two_processes_over_grpc(served: Served) -> None:
    with Client(served.address) as client:
        result = client.generate(
            "hello", timeout_s=60, max_tokens=8, temperature=0.0, ignore_eos=True
        )
        timings = result.answers[0].finish.timings
        assert (timings.prefill_forwards, timings.decode_forwards) == (1, 7)
        assert timings.kv_bytes_handed_over > 0
        workers = {w.worker_id: w for pool in client.status().pools for w in pool.workers}
        assert workers.keys() == {timings.prefill_worker, timings.decode_worker}
        pids = {worker.pid for worker in workers.values()} | {served.process.pid}
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)


def test_rays_parts_that_nobody_asks_are_not_there(served: Served) -> None:
    words = [word for process in served.descendants for word in process.cmdline() if runs(process)]
    started = {word.rpartition("/")[2] for word in words}
    assert "raylet" in started
    assert not {"monitor.py", "log_monitor.py", "dashboard.py"} & started


def test_the_commands_work_on_it(served: Served) -> None:
    at = ("--address", served.address)
    answer = legato("generate", "hi", "--max-tokens", "4", "--temperature", "0", *at)
    again = legato("generate", "hi", "--max-tokens", "4", "--temperature", "0", *at)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == again.stdout
    assert "ready" in legato("status", *at).stdout
    busy = legato("serve", "--model", "demo", "--port", served.address.rpartition(":")[2])
    assert busy.returncode == 1
    assert busy.stderr.count("\n") == 1
    assert "is in use" in busy.stderr


def test_only_loopback_is_listened_on_by_our_own_servers(served: Served) -> None:
    with Client(served.address) as client:
        ours = {w.address for pool in client.status().pools for w in pool.workers}
    ports = {int(address.rpartition(":")[2]) for address in ours | {served.address}}
    listeners = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in served.descendants
        if process.is_running()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    assert listeners == {("127.0.0.1", port) for port in ports}


def test_pools_grow_and_shrink_and_running_streams_finish(served: Served) -> None:
    with Client(served.address) as client:
        alone = [ask(client, f"prompt {i}", 2000) for i in range(4)]
        assert client.scale({"decode": 2}) == {"prefill": 1, "decode": 2}
        wait_for(client, 1, 2)
        with ThreadPoolExecutor(4) as threads:
            streams = [threads.submit(ask, client, f"prompt {i}", 2000) for i in range(4)]
            deadline_s = time.monotonic() + 30
            while not all(w.load.running for w in client.status().pools[1].workers):
                assert time.monotonic() < deadline_s, "the workers never ran at the same time"
                time.sleep(0.01)
            client.scale({"decode": 1})
            while not any(w.phase == DRAINING for w in client.status().pools[1].workers):
                assert time.monotonic() < deadline_s, "no worker was seen to drain"
                time.sleep(0.01)
            assert not any(stream.done() for stream in streams), "no stream ran in the drain"
            assert [stream.result(120) for stream in streams] == alone
        wait_for(client, 1, 1)
        served.note_descendants()


def test_a_killed_worker_is_replaced(served: Served) -> None:
    with Client(served.address) as client:
        before = ask(client, "again", 16)
        (worker,) = client.status().pools[1].workers
        os.kill(worker.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while any(w.worker_id == worker.worker_id for w in client.status().pools[1].workers):
            assert time.monotonic() < deadline_s, "the death was not noticed"
            time.sleep(0.05)
        wait_for(client, 1, 1)
        assert ask(client, "again", 16) == before
        served.note_descendants()


def test_a_stopped_worker_is_ended_and_replaced(served: Served) -> None:
    with Client(served.address) as client:
        (worker,) = client.status().pools[1].workers
        stopped = psutil.Process(worker.pid)
        stopped.suspend()
        deadline_s = time.monotonic() + 15
        while any(w.worker_id == worker.worker_id for w in client.status().pools[1].workers):
            assert time.monotonic() < deadline_s, "the hang was not noticed"
            time.sleep(0.1)
        # It must not stay behind with its memory, as Ray alone would leave it.
        psutil.wait_procs([stopped], timeout=10)
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        wait_for(client, 1, 1)
        assert len(ask(client, "again", 16)) == 16
        served.note_descendants()


def test_stop_ends_everything(served: Served) -> None:
    # The last one: it ends the service that the tests above share.
    with Client(served.address) as client, ThreadPoolExecutor(2) as threads:
        # The command takes a second or more to start; the answer takes many.
        stopping = threads.submit(legato, "stop", "--address", served.address, "--drain", "100")
        stream = client.stream("still running", timeout_s=120, max_tokens=8000, ignore_eos=True)
        first = next(stream)
        assert isinstance(first, Tokens)
        num_tokens = len(first.token_ids)
        with grpc.insecure_channel(served.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked, deadline_s = health_pb2.HealthCheckRequest(), time.monotonic() + 30
            while health.Check(asked, timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
                assert time.monotonic() < deadline_s, "the drain did not begin"
                time.sleep(0.02)
        assert client.status().router.in_flight == 1, "the answer was over before the drain"
        num_tokens += sum(len(event.token_ids) for event in stream if isinstance(event, Tokens))
        assert stream.num_attempts == 1
        ended = stopping.result(START_TIMEOUT_S)
        assert (ended.returncode, ended.stdout) == (0, "stopped\n")
        assert num_tokens == 8000
    assert served.process.wait(END_TIMEOUT_S) == 0
    assert served.survivors(10) == []
    assert "Traceback" not in served.output


def test_ctrl_c_ends_everything(model: Path, tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--model", str(model), *SMALL) as service:
        folder = service.temp_folder()
        assert folder.stat().st_mode & 0o777 == 0o700  # Ray's own folders are open to everybody
        service.interrupt()
        assert service.process.wait(END_TIMEOUT_S) == 0
        assert service.survivors(10) == []
    assert not folder.exists()
    assert "Traceback" not in service.output


def test_nothing_outlives_a_killed_owner(model: Path, tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--model", str(model), *SMALL) as service:
        folder = service.temp_folder()
        service.process.kill()
        service.process.wait()
        assert service.survivors(30) == []
        deadline_s = time.monotonic() + 30  # the janitor has the last word
        while folder.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
    assert not folder.exists()


def test_a_stopped_router_is_ended_and_started_again(model: Path, tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--model", str(model), *SMALL) as service:
        (router,) = (p for p in service.descendants if "RouterActor" in " ".join(p.cmdline()))
        router.suspend()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while "serves again" not in service.output:
            assert time.monotonic() < deadline_s, service.output
            time.sleep(0.1)
        assert f"router {service.address} has not answered for 10 s; it is ended" in service.output
        assert not runs(router)
        with Client(service.address) as client:
            client.wait_ready(END_TIMEOUT_S)
            assert len(ask(client, "again", 8)) == 8
        service.note_descendants()
        service.interrupt()
        assert service.process.wait(END_TIMEOUT_S) == 0
        assert service.survivors(10) == []


def test_a_bad_model_ends_the_start_with_the_reason(model: Path, tmp_path: Path) -> None:
    absent = legato("serve", "--model", str(tmp_path / "absent"), "--port", "0")
    assert absent.returncode == 1
    assert str(tmp_path / "absent") in absent.stderr
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        data = file.read_bytes()
        cut = len(data) - 1000 if file.suffix == ".safetensors" else len(data)
        (broken / file.name).write_bytes(data[:cut])
    refused = legato("serve", "--model", str(broken), "--port", "0", *SMALL)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("legato: ")
    assert "model.safetensors" in last
    assert "Traceback" not in refused.stderr


def test_a_dead_ray_address_is_an_error_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started_s = time.monotonic()
        words = ("serve", "--model", "demo", "--port", "0", "--ray-address")
        for env, given in (({}, address), ({"RAY_ADDRESS": address}, "auto")):
            failed = legato(*words, given, env=env)
            assert failed.returncode == 1
            assert failed.stderr.startswith(f"legato: no Ray cluster answers at {address}")
        assert time.monotonic() - started_s < 60


def test_it_joins_a_running_cluster_and_leaves_it_running(model: Path, tmp_path: Path) -> None:
    env = {"RAY_AUTH_MODE": "disabled"}
    with ray_head(tmp_path) as ray_address:
        join = ("--model", str(model), "--ray-address", ray_address, *SMALL)
        # Two workers of one CPU each do not fit: said while waiting, and at the end.
        small = legato("serve", "--port", "0", *join, "--start-timeout", "18", env=env)
        assert small.returncode == 1
        waiting = (
            "waiting for room: a decode worker needs CPU=1; the most free on one node is CPU=0"
        )
        assert waiting in small.stderr.replace("a prefill worker", "a decode worker")
        fits = (*join, "--worker-cpus", "0.5")
        with Served(tmp_path / "log", *fits, env=env) as service, Client(service.address) as client:
            workers = [w for pool in client.status().pools for w in pool.workers]
            assert len(ask(client, "hello", 8)) == 8
            ended = legato("stop", "--address", service.address)
            assert (ended.returncode, ended.stdout) == (0, "stopped\n")
            processes = [psutil.Process(w.pid) for w in workers if psutil.pid_exists(w.pid)]
            _, alive = psutil.wait_procs(processes, timeout=10)
            assert alive == []
        probe = legato("serve", "--port", "0", "--model", "/absent", "--ray-address", ray_address)
        assert "/absent" in probe.stderr  # it got past the check that the cluster answers


def test_a_cluster_that_wants_a_token_gets_it_or_the_start_says_so(
    model: Path, tmp_path: Path
) -> None:
    with ray_head(tmp_path, token=True) as ray_address:
        join = ("--model", str(model), "--ray-address", ray_address, "--worker-cpus", "0.5", *SMALL)
        home = {"HOME": str(tmp_path)}  # no token file there
        started_s = time.monotonic()
        without = legato("serve", "--port", "0", *join, env=home)
        assert without.returncode == 1
        assert f"the Ray cluster at {ray_address} wants a token" in without.stderr
        assert time.monotonic() - started_s < 30
        env = {**home, "RAY_AUTH_TOKEN": TOKEN}
        with Served(tmp_path / "log", *join, env=env) as service, Client(service.address) as client:
            assert len(ask(client, "hello", 8)) == 8
