"""Served: `legato serve` as a user runs it, in a process of its own, for end-to-end tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
from ports import service_port

from legato.cluster.janitor import MARK

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "legato.cluster.cli.main")
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This one, with the link tree in front, so that an uninstalled checkout works too."""
    links = str(ROOT / "build" / "ns")
    path = os.pathsep.join(p for p in (links, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def legato(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
        env=environment(env),
    )


def runs(process: psutil.Process) -> bool:
    """False once it has ended, whether or not its parent has taken note of that yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Served:
    """Started at construction, ended with the block; `address` once it is ready."""

    def __init__(self, log: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--port", service_port(), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the whole group, as in a terminal
                env=environment(env),
            )
        self.address = self._wait_until_ready()
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def output(self) -> str:
        """All it has printed."""
        return self._log.read_text()

    def temp_folder(self) -> Path:
        """Of its Ray, as its processes carry it in their environment."""
        for process in self.descendants:
            if found := process.environ().get(MARK):
                return Path(found)
        raise RuntimeError(f"no process of {self.process.pid} carries {MARK}")

    def note_descendants(self) -> None:
        """Adds processes that were started later."""
        self.descendants += psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def survivors(self, timeout_s: float) -> list[str]:
        """Processes that still run `timeout_s` from now, or [] as soon as none does."""
        deadline_s = time.monotonic() + timeout_s
        while (alive := [p for p in self.descendants if runs(p)]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return [f"{process.pid} {process.name()}" for process in alive]

    def _wait_until_ready(self) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if found := re.search(r"ready at (\S+)", self.output):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        raise RuntimeError(f"legato serve did not become ready:\n{self.output}")
