"""ControlCalls: the router's ControlPlane, over calls to the controller actor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.cluster.actors.calls import bounded
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.role_change import RoleChange
    from legato.cluster.router_load import RouterLoad


class ControlCalls:
    """ControlPlane over calls to the controller actor; each ends within CALL_TIMEOUT_S."""

    def __init__(self, controller: Any) -> None:  # noqa: ANN401  # an actor handle has no static type
        self._controller = controller

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        """See ControlPlane."""
        raw = await bounded(self._controller.pools.remote())
        return [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        """See ControlPlane; ValueError where a size is out of range."""
        result: dict[Role, int] = await bounded(self._controller.scale.remote(dict(targets)))
        return result

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        """See ControlPlane."""
        change: RoleChange = await bounded(self._controller.change_role.remote(worker_id, role))
        return change

    async def shutdown(self, drain_timeout_s: float) -> None:
        """See ControlPlane."""
        await bounded(self._controller.shutdown.remote(drain_timeout_s))

    async def report_lost(self, worker_id: str, reason: str) -> None:
        """See ControlPlane."""
        await bounded(self._controller.report_lost.remote(worker_id, reason))

    async def report_load(self, load: RouterLoad) -> None:
        """See ControlPlane."""
        await bounded(self._controller.report_load.remote(load))

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        """See ControlPlane."""
        data: bytes = await bounded(self._controller.autoscaler.remote())
        return cluster_pb2.AutoscalerStatus.FromString(data)
