"""Worker processes for integration tests: started, waited for, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0


@dataclass
class WorkerProcess:
    """A worker that is ready."""

    process: subprocess.Popen[str]
    worker_id: str
    address: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)


def command(model: Path | str, role: str, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "legato.worker", "--model", str(model), "--role", role),
        *("--threads", "1", "--die-with-parent"),
        *arguments,
    ]


def environment() -> dict[str, str]:
    """This one, with the link tree in front, so that an uninstalled checkout works too."""
    links = str(ROOT / "build" / "ns")
    path = os.pathsep.join(p for p in (links, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path}


@contextmanager
def worker_process(model: Path | str, role: str, *arguments: str) -> Iterator[WorkerProcess]:
    """Starts a worker, waits for its ready line, and kills it at the end if it still runs."""
    process = subprocess.Popen(
        command(model, role, *arguments), env=environment(), stdout=subprocess.PIPE, text=True
    )
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        killer.cancel()
        if not line:
            raise RuntimeError(f"the {role} worker did not start: exit status {process.wait(10)}")
        ready = json.loads(line)
        assert ready["event"] == "ready"
        yield WorkerProcess(process, ready["worker_id"], ready["address"])
    finally:
        killer.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)  # a stopped one would outlive nothing but a KILL
            process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
