"""Plans: what the actors are told of the service that they are part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos.internal_access import ANYBODY, InternalAccess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.config import EngineOptions, RouterOptions
    from legato.cluster.control_plane import Role
    from legato.cluster.placement import WorkerPlacement


@dataclass(frozen=True)
class WorkerPlan:
    """Everything the controller needs to start any worker of the service."""

    model: str
    engines: Mapping[Role, EngineOptions]
    placements: Mapping[Role, WorkerPlacement]
    spread: bool  # over the nodes of a joined cluster
    nodes_may_come: bool = False  # from an autoscaler of Ray's
    access: InternalAccess = ANYBODY  # the workers' own

    def obstacle(self, before: Role, after: Role) -> str:
        """Why no worker of the one role can go on in the other, or nothing."""
        had, wanted = self.engines[before], self.engines[after]
        if had.dtype != wanted.dtype:
            return (
                f"its weights are loaded for dtype {had.dtype}, a {after} worker's are "
                f"{wanted.dtype}"
            )
        place, other = self.placements[before], self.placements[after]
        if place.device != other.device:
            return f"its weights are on {place.device}, a {after} worker's are on {other.device}"
        has, asks = (", ".join(p.demand.parts()) or "nothing" for p in (place, other))
        if has != asks:
            return f"its place was chosen for {has}, a {after} worker asks for {asks}"
        return ""


@dataclass(frozen=True)
class RouterPlan:
    """Everything a router actor needs."""

    options: RouterOptions  # of the first router: see `port_of`
    num_routers: int
    model_path: str
    model_name: str
    version: str
    owner_pid: int
    owner_host: str
    started_at: float | None = None  # of the service, on the monotonic clock of its owner's machine

    def port_of(self, number: int) -> int:
        """Where the router of that number, from 0, listens; 0 where any free port will do."""
        return self.options.port and self.options.port + number

    def http_port_of(self, number: int) -> int | None:
        """The same of its HTTP endpoint; None where it has none."""
        return self.options.http_port and self.options.http_port + number
