"""check_identity: which workers may serve together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.roles import WIRE_ROLES
from legato.protos.kv_fit import fits
from legato.protos.protocol_version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.control_plane import Role, WorkerEndpoint
    from legato.protos import worker_pb2


class IdentityMismatchError(Exception):
    """A worker that may not serve together with the others; the message names the field."""


def check_identity(
    endpoint: WorkerEndpoint,
    identity: worker_pb2.WorkerIdentity,
    references: Mapping[Role, worker_pb2.WorkerIdentity],
) -> None:
    """Refuses a worker whose KV or tokens another could not use, by the first worker of each pool;
    block sizes may differ.

    Within a pool all else is equal, so that a request may go on anywhere in it. What may differ
    between the pools says `legato.protos.kv_fit`.

    Raises:
        IdentityMismatchError: naming the field, its value and the one expected.
    """
    layout = identity.kv_layout
    found = {"worker_id": identity.worker_id, "role": identity.role}
    expected = {"worker_id": endpoint.worker_id, "role": WIRE_ROLES[endpoint.role]}
    found["protocol_version"] = identity.protocol_version
    expected["protocol_version"] = PROTOCOL_VERSION
    own_pool = endpoint.role in references
    reference = references.get(endpoint.role, next(iter(references.values()), None))
    if reference is not None:
        for name in ("model_fingerprint", "kv_wire", "weights", "dtype", "vocab_size"):
            found[name] = getattr(identity, name)
            expected[name] = getattr(reference, name)
        for name in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
            found[f"kv_layout.{name}"] = getattr(layout, name)
            expected[f"kv_layout.{name}"] = getattr(reference.kv_layout, name)
    for name, value in found.items():
        if not fits(name, value, expected[name], "same" if own_pool else identity.kv_wire):
            raise IdentityMismatchError(
                f"worker {endpoint.worker_id} at {endpoint.address}: {name} is {value!r}, "
                f"expected {expected[name]!r}"
            )
    if identity.total_blocks < 1 or layout.block_size < 1:
        raise IdentityMismatchError(
            f"worker {endpoint.worker_id} at {endpoint.address}: total_blocks is "
            f"{identity.total_blocks} and kv_layout.block_size is {layout.block_size}; "
            f"both must be at least 1"
        )
