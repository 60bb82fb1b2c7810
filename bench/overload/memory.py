"""Resident memory of a service's processes, by what they are."""

from __future__ import annotations

import contextlib

import psutil

ROLES = {
    "router": "RouterActor",
    "controller": "ControllerActor",
    "prefill": "--role prefill",
    "decode": "--role decode",
}


class ServiceMemory:
    """Of the process that owns a service, and all that it has started. Linux."""

    def __init__(self, owner_pid: int) -> None:
        self._processes = {}
        owner = psutil.Process(owner_pid)
        for process in (owner, *owner.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                names = [role for role, sign in ROLES.items() if sign in words]
                if names:
                    self._processes[f"{names[0]} {process.pid}"] = process

    def rss_bytes(self) -> dict[str, int]:
        """Now, of those that still run."""
        found = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = process.memory_info().rss
        return found
