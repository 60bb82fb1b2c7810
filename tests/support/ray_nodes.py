"""RayNodes: a Ray cluster of several nodes on this machine, each with an address of its own.

Ray's own cluster fixture, in a process of its own: so that no test's process is a part of Ray, and
that nothing of it outlives the tests, however they end (it ends when its standard input does).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

CPUS = 4  # of each node


class RayNodes:
    """Use as a context manager. Nodes besides the head are 127.0.0.2, 127.0.0.3, and so on."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lt-"))  # short: Ray puts sockets there
        (self._folder / "ray").mkdir()
        self.env = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # as in a Ray of our own
            "RAY_TMPDIR": str(self._folder),
        }
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.env},
            )
        self.address: str = self._read()["address"]
        self._has_head = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30 if self._has_head else 0)  # Ray's own farewell needs the head
        except subprocess.TimeoutExpired:
            _kill_tree(psutil.Process(self._process.pid))
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, resources: Mapping[str, float], labels: Mapping[str, str] | None = None) -> str:
        """Returns the new node's address."""
        return str(self._ask({"resources": dict(resources), "labels": dict(labels or {})}))

    def kill(self, address: str) -> None:
        """Ends its raylet and every process that this one started by SIGKILL, at once."""
        self._ask({"kill": address})

    def kill_head(self) -> None:
        """SIGKILL to the process that knows the cluster; all nodes, that of the head too, go on."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        next(member for member in family if member.name() == "gcs_server").kill()
        self._has_head = False

    def logged(self, pattern: str) -> list[str]:
        """What `pattern` finds in the logs of all processes that Ray started, sorted."""
        logs = (self._folder / "ray" / "session_latest" / "logs").glob("worker-*.err")
        return sorted(found for log in logs for found in re.findall(pattern, log.read_text()))

    def _ask(self, question: Mapping[str, Any]) -> Any:  # noqa: ANN401  # JSON
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()["done"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # Ray prints here as well
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError((self._folder / "log").read_text()[-4000:])


def _kill_tree(process: psutil.Process) -> None:
    family = [process, *process.children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def main() -> None:
    """Obeys lines of JSON on standard input."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False}
    )
    print(json.dumps({"address": cluster.address}), flush=True)
    nodes: dict[str, Any] = {}
    num_added = 0
    try:
        for line in sys.stdin:
            question = json.loads(line)
            if address := question.get("kill"):
                raylet = nodes.pop(address).all_processes["raylet"][0].process
                _kill_tree(psutil.Process(raylet.pid))
            else:
                num_added += 1
                address = f"127.0.0.{1 + num_added}"
                nodes[address] = cluster.add_node(
                    node_ip_address=address, num_cpus=CPUS, **question
                )
            print(json.dumps({"done": address}), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
