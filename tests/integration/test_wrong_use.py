"""What a user gets wrong when starting a service: one clear sentence in time, and nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from served import COMMAND, environment, legato
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

BOUND_S = 30.0
RAY_TOO_SLOW = "The current node timed out during startup"  # after 30 s, which Ray has fixed
NUM_TRIES = 3
DEATHS_BOUND_S = 60.0  # of three starts, two of them with the start of a process
SMALL = ("--port", "0", "--kv-memory", "16MiB", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("wrong") / "tiny")


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Accepts whoever comes, and says `answer` to each; with b"", nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as open_ones:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                open_ones.enter_context(connection)
                if answer:
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def refused(*words: str, code: int = 1) -> str:
    """The one sentence of a start that fails within the bound. How long a Ray of our own takes to
    start is the machine's matter, which may be busy: that counts for nothing.
    """
    for _ in range(NUM_TRIES):
        started_s = time.monotonic()
        failed = legato("serve", *SMALL, *words)
        took_s = time.monotonic() - started_s
        if RAY_TOO_SLOW not in failed.stderr:
            break
    assert failed.returncode == code, failed.stderr
    assert "Traceback" not in failed.stderr
    ray_s = [float(at_s) for at_s in re.findall(r"\[ *([\d.]+) s\] Ray started", failed.stderr)]
    assert took_s - sum(ray_s) < BOUND_S, failed.stderr
    return failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 4096])
def test_an_address_where_no_ray_answers(answer: bytes) -> None:
    with listener(answer) as address:
        told = refused("--model", "demo", "--ray-address", address)
    assert told.startswith(f"legato: what listens at {address} is no Ray head (")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ray-address", "no.host.invalid:6379"), "no Ray cluster answers at no.host.invalid:6"),
        (("--ray-address", "127.0.0.1"), "Ray address must be auto or host:port"),
        (("--worker-host", "203.0.113.7"), "--worker-host: cannot listen on 203.0.113.7: Cannot"),
        (("--worker-host", "no.host.invalid"), "--worker-host no.host.invalid: "),
        (
            ("--decode-resources", "CPU=1,fast_gpu=1,label:zone=a"),
            "--decode-resources: no node has fast_gpu=1, label:zone=a: a Ray of our own is this ",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: tuple[str, ...], told: str
) -> None:
    assert refused("--model", "demo", *words).startswith(f"legato: {told}")


def test_resources_that_this_machine_has_not(model: Path) -> None:
    told = refused("--model", str(model), "--prefill-resources", "CPU=4096")
    assert told.startswith(
        "legato: no node of the cluster can hold a prefill worker, which needs CPU=4096: the most "
        "on any node is CPU="
    )


@pytest.mark.parametrize("option", ["--prefill-resources", "--decode-resources"])
def test_a_wrong_word_names_its_option(option: str) -> None:
    told = refused("--model", "demo", option, "CPU=1,gpus=1", code=2)
    assert told == (
        f"legato: Invalid value for {option}: 'gpus=1' names no resource of Ray's: did you mean "
        "GPU? (see `legato serve --help`)"
    )


def test_a_worker_that_dies_at_its_start_three_times(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed: set[int] = set()
    family: set[psutil.Process] = set()
    with log.open("w") as file:
        service = subprocess.Popen(
            [*COMMAND, "serve", "--model", str(model), *SMALL],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    first_s, deadline_s = 0.0, time.monotonic() + 180
    try:
        while service.poll() is None:
            assert time.monotonic() < deadline_s, log.read_text()
            family.update(psutil.Process(service.pid).children(recursive=True))
            for process in family:
                if process.pid not in killed and _is_worker(process):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.add(process.pid)
                    first_s = first_s or time.monotonic()
            time.sleep(0.02)
    finally:
        if service.poll() is None:
            service.kill()
            service.wait()
    took_s = time.monotonic() - first_s
    assert len(killed) >= 3, log.read_text()
    assert service.returncode == 1
    told = log.read_text().splitlines()[-1]
    assert told.startswith("legato: ")
    assert "-3: its process ended: " in told
    assert told.endswith("; 3 starts failed in a row")
    assert "Traceback" not in log.read_text()
    assert took_s < DEATHS_BOUND_S, took_s
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def _is_worker(process: psutil.Process) -> bool:
    try:
        return (
            re.search("WorkerActor|legato [a-z]+ worker", " ".join(process.cmdline())) is not None
        )
    except psutil.Error:
        return False
