"""The calls of a client that are one question and one answer, and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.roles import WIRE_ROLES
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.control_plane import Role

CALL_TIMEOUT_S = 10.0  # of each, at each router
READY_POLL_S = 0.1
READY_CHECK_TIMEOUT_S = 2.0


def scale_request(targets: Mapping[Role, int]) -> cluster_pb2.ScalePoolRequest:
    """Targets by name of the pool."""
    return cluster_pb2.ScalePoolRequest(
        targets=[
            cluster_pb2.PoolTarget(
                role=WIRE_ROLES[role],
                target=target,
            )
            for role, target in targets.items()
        ]
    )


def role_targets(response: cluster_pb2.ScalePoolResponse) -> dict[str, int]:
    """The reverse of `scale_request`."""
    names = {number: role for role, number in WIRE_ROLES.items()}
    return {names[item.role]: item.target for item in response.targets}
