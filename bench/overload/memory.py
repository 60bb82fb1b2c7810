"""Resident memory of a service's processes, by what they are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.protos import cluster_pb2

# What Ray calls the processes of these actors begins so, and ends with what they do at the moment.
ACTORS = {"router": "ray::RouterActor", "controller": "ray::ControllerActor"}


class ServiceMemory:
    """Of a service on this machine: its workers, and the router and controller beside them."""

    def __init__(self, status: cluster_pb2.GetStatusResponse) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for pool in status.pools:
            role = common_pb2.WorkerRole.Name(pool.role).removeprefix("WORKER_ROLE_").lower()
            for worker in pool.workers:
                process = psutil.Process(worker.pid)
                self._processes[f"{role} {worker.pid}"] = process
                # Ray starts all processes of a node from one.
                node = process.parent()
                for beside in node.children() if node is not None else ():
                    self._add_actor(beside)
        missing = ACTORS.keys() - {name.split()[0] for name in self._processes}
        assert not missing, f"no process of {sorted(missing)} was found"

    def _add_actor(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            for name, sign in ACTORS.items():
                if words.startswith(sign):
                    self._processes[f"{name} {process.pid}"] = process

    def rss_bytes(self) -> dict[str, int]:
        """Now, of those that still run."""
        found = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = process.memory_info().rss
        return found
