"""World: a controller over a launcher that only notes what it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.controller import Controller, StartedWorker
from legato.cluster.pool import ControllerOptions

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role, WorkerEndpoint


class FakeLauncher:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.shortage = ""
        self.mismatch = ""
        self.no_room: set[str] = set()

    def start(self, name: str, role: Role) -> None:
        self.log.append(f"start {name}")

    def adopt(self, name: str, role: Role) -> None:
        self.log.append(f"adopt {name}")

    def drain(self, name: str, timeout_s: float) -> None:
        self.log.append(f"drain {name}")

    def kill(self, name: str) -> None:
        self.log.append(f"kill {name}")

    def retire(self, name: str, timeout_s: float) -> None:
        self.log.append(f"retire {name}")

    def rebuild(self, name: str, new_name: str, role: Role) -> None:
        self.log.append(f"rebuild {name} {new_name}")

    def obstacle(self, before: Role, after: Role) -> str:
        return self.mismatch

    def waiting_for(self, name: str) -> str:
        return self.shortage

    def lacks_room(self, name: str) -> bool:
        return name in self.no_room

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


class World:
    """A controller, its launcher, and what the router was told."""

    def __init__(self, prefill: int = 1, decode: int = 1, *, restart: bool = True) -> None:
        self.launcher = FakeLauncher()
        self.published: list[tuple[WorkerEndpoint, ...]] = []
        targets: dict[Role, int] = {"prefill": prefill, "decode": decode}
        options = ControllerOptions(restart=restart)
        self.controller = Controller(self.launcher, self.published.append, targets, options)
        self.controller.step(0.0)

    def ready(self, *names: str, now_s: float = 1.0) -> None:
        for name in names:
            started = StartedWorker(f"id-{name}", f"127.0.0.1:{len(name)}", 100, "here")
            self.controller.on_ready(name, started, now_s)

    def ids(self) -> list[str]:
        return [f"{w.worker_id}{' draining' * w.draining}" for w in self.published[-1]]
