"""The seam between the router (data plane) and the controller (what runs where)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad
    from legato.protos import cluster_pb2

Role = Literal["prefill", "decode", "colocated"]


@dataclass(frozen=True)
class WorkerEndpoint:
    """A worker that has started: its identity and where it listens."""

    worker_id: str  # unique for ever: another process at the same address has another id
    role: Role
    address: str  # host:port
    draining: bool = False


class ControlPlane(Protocol):
    """What the router asks of the controller. `ControlCalls` is over Ray."""

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """Targets and workers of all pools; the router adds each worker's load."""
        ...

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """Sets targets of the pools named; returns those of both."""
        ...

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """Begins a worker's change of role. ValueError where it may not: an UnknownWorkerError or a
        RoleChangeRefusedError, or of another class where the words of the request are wrong.
        """
        ...

    async def drain_worker(self, worker_id: str) -> str:
        """Begins to take a ready worker out, to be replaced; its id in full. Errors as of
        `change_role`.
        """
        ...

    async def drain_node(self, node: str) -> list[str]:
        """Begins to take all workers of a node out, for good; their ids. Errors as of
        `change_role`.
        """
        ...

    async def shutdown(self, drain_timeout_s: float) -> None:
        """Begins the orderly end of the whole service; returns at once."""
        ...

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """The router saw this worker hang or die on the data path: replace it."""
        ...

    async def report_load(self, load: RouterLoad) -> None:
        """Where the pools are autoscaled: what this router sees, once a second."""
        ...

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        """Where the pools are autoscaled: ranges, needs and the last decisions."""
        ...
