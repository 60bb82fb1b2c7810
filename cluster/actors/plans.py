"""Plans: what the actors are told of the service that they are part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def port_of(self, number: int) -> int:
        """Where the router of that number, from 0, listens; 0 where any free port will do."""
        return self.options.port and self.options.port + number
