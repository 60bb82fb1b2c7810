"""Roles: those that a worker may have, and their numbers on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role

WIRE_ROLES: dict[Role, common_pb2.WorkerRole.ValueType] = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "colocated": common_pb2.WORKER_ROLE_COLOCATED,
}
ROLES: tuple[Role, ...] = tuple(WIRE_ROLES)
PAIR: tuple[Role, Role] = ("prefill", "decode")  # one of each serves a request together
_NAMES: dict[int, Role] = {number: role for role, number in WIRE_ROLES.items()}


def role_of(number: int) -> Role | None:
    """The role with that number on the wire; None where there is none."""
    return _NAMES.get(number)
