"""ControlCalls: the router's ControlPlane, over calls to the controller actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.cluster.actors.calls import bounded
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad


class ControlCalls:
    """ControlPlane over calls to the controller actor; each ends within COMMAND_TIMEOUT_S.

    The end of the service is for its owner, who listens to each router: that way needs no
    controller.
    """

    def __init__(self, controller: Any, end_service: Callable[[float], None]) -> None:  # noqa: ANN401  # an actor handle has no static type
        self._controller = controller
        self._end_service = end_service

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """See ControlPlane."""
        raw = await bounded(self._controller.pools.remote)
        return [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """See ControlPlane; ValueError where a size is out of range."""
        wanted = dict(targets)
        result: dict[Role, int] = await bounded(lambda: self._controller.scale.remote(wanted))
        return result

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """See ControlPlane."""
        change: RoleChange = await bounded(
            lambda: self._controller.change_role.remote(worker_id, role)
        )
        return change

    async def drain_worker(self, worker_id: str) -> str:
        """See ControlPlane."""
        full_id: str = await bounded(lambda: self._controller.drain_worker.remote(worker_id))
        return full_id

    async def drain_node(self, node: str) -> list[str]:
        """See ControlPlane."""
        ids: list[str] = await bounded(lambda: self._controller.drain_node.remote(node))
        return ids

    async def shutdown(self, drain_timeout_s: float) -> None:
        """See ControlPlane."""
        self._end_service(drain_timeout_s)

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See ControlPlane."""
        await bounded(lambda: self._controller.report_lost.remote(worker_id, reason))

    async def report_load(self, load: RouterLoad) -> None:
        """See ControlPlane."""
        await bounded(lambda: self._controller.report_load.remote(load))

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        """See ControlPlane."""
        data: bytes = await bounded(lambda: self._controller.autoscaler.remote())
        return cluster_pb2.AutoscalerStatus.FromString(data)
