"""Deployed: the commands of deployment files, run here with a loopback address for each node.

In them only addresses, ports and paths are others than in the files. All that they leave running is
ended by the mark that each process has in its environment: `ray start` leaves daemons behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray_head import TOKEN
from served import environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEAD = "127.0.0.1"
_COMMANDS = '#!/bin/sh\nexec {python} -m {module} "$@"\n'
_MODULES = {"legato": "legato.cluster.cli.main", "ray": "ray.scripts.scripts"}


class Deployed:
    """Use as a context manager. `swaps`: what stands in a file, and what takes its place here."""

    def __init__(self, folder: Path, swaps: Mapping[str, str]) -> None:
        self.swaps = dict(swaps)
        self._folder = folder
        self._temp = tempfile.mkdtemp(prefix="lt-")  # short: Ray puts sockets there
        programs = folder / "bin"
        programs.mkdir()
        for name, module in _MODULES.items():
            (programs / name).write_text(_COMMANDS.format(python=sys.executable, module=module))
            (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
        self._env = environment(
            {
                "PATH": path,
                "RAY_TMPDIR": self._temp,
                "RAY_worker_niceness": "0",
                # Not in the files, and not contrary to them: a small machine has all nodes.
                "LEGATO_THREADS": "1",
                "LEGATO_KV_MEMORY": "32MiB",
            }
        )
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
        mine = [process for process in psutil.process_iter() if self._is_mine(process)]
        for process in mine:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(mine, timeout=10)
        for started in self._started:
            started.wait(10)
        shutil.rmtree(self._temp, ignore_errors=True)

    def start(
        self, name: str, words: list[str], env: Mapping[str, str], address: str = HEAD
    ) -> subprocess.Popen[bytes]:
        """Of a node at `address`; `log(name)` has what it prints."""
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [self.swapped(word, address) for word in words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._env, **self._swapped_env(env, address)},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(
        self, words: list[str], env: Mapping[str, str], address: str = HEAD, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """To its end."""
        return subprocess.run(
            [self.swapped(word, address) for word in words],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**self._env, **self._swapped_env(env, address)},
        )

    def log(self, name: str) -> str:
        """All it has printed."""
        return (self._folder / f"{name}.log").read_text()

    def wait_for(self, name: str, text: str, timeout_s: float = 120) -> None:
        """Until it has printed that."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log(name):
            assert time.monotonic() < deadline_s, f"{name}:\n{self.log(name)}"
            time.sleep(0.1)

    def swapped(self, text: str, address: str = HEAD) -> str:
        """As it is here: a node is told its address, which it cannot find out on this machine."""
        for given, here in self.swaps.items():
            text = text.replace(given, here)
        if "--node-ip-address" not in text:
            text = text.replace("ray start ", f"ray start --node-ip-address={address} ")
        return text

    def _swapped_env(self, env: Mapping[str, str], address: str) -> dict[str, str]:
        return {name: self.swapped(value, address) for name, value in env.items()}

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAY_TMPDIR") == self._temp
        except psutil.Error:
            return False


def probe(address: str, timeout_s: float = 2.0) -> bool:
    """What the kubelet does for `grpc: {port: …}`: no token, no TLS, SERVING or not."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def wait_probe(address: str, timeout_s: float = 120) -> None:
    """Until it says that it serves."""
    deadline_s = time.monotonic() + timeout_s
    while not probe(address):
        assert time.monotonic() < deadline_s, address
        time.sleep(0.2)


def terminate(process: subprocess.Popen[bytes], timeout_s: float = 30) -> int:
    """As the kubelet and systemd do; its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout_s)


def container_env(box: Mapping[str, list[dict[str, object]]], address: str) -> dict[str, str]:
    """Of a container, as its manifest says it; the pod's address is its own."""
    env = {}
    for item in box["env"]:
        assert "secretKeyRef" not in str(item), "no secret but Ray's is an environment variable"
        env[str(item["name"])] = address if "valueFrom" in item else str(item["value"])
    return env


def operator_env(cluster: Mapping[str, Any], group: str, pod: str) -> dict[str, str]:
    """What KubeRay's operator adds to it, and Ray or Legato might heed."""
    spec, head = cluster["spec"], group == "headgroup"
    service = spec["headGroupSpec"]["headService"]["metadata"]["name"]
    env = {
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_CLOUD_INSTANCE_ID": pod,
        "RAY_NODE_TYPE_NAME": group,
        "RAY_PORT": "6379",
        "RAY_ADDRESS": f"{'127.0.0.1' if head else service}:6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
    }
    if spec.get("authOptions", {}).get("mode") == "token":
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    if head and spec["autoscalerOptions"].get("version") == "v2":
        env["RAY_enable_autoscaler_v2"] = "true"
    return env
