"""RayAddress: which Ray cluster to join, and proof that one answers there, before Ray is asked.

`ray.init` with a dead address was seen to hang for more than four minutes; every check here is
bounded by a few seconds.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc

from legato.cluster.errors import ServiceError

DEFAULT_RAY_PORT = 6379
PROBE_TIMEOUT_S = 5.0
# Where `ray start` leaves the address of the cluster that this machine belongs to.
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
_HOW_TO_START = (
    "start one with `ray start --head`, or leave out --ray-address to use a Ray of our own"
)


def running_cluster(current_cluster: Path = _CURRENT_CLUSTER) -> str | None:
    """The cluster that "auto" means: RAY_ADDRESS, else the one started on this machine."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address and address != "auto":
        return address
    if current_cluster.is_file():
        return current_cluster.read_text().strip() or None
    return None


def resolve_ray_address(given: str, current_cluster: Path = _CURRENT_CLUSTER) -> str:
    """host:port for what `--ray-address` says.

    Raises:
        ServiceError: none is running, or the address is none.
    """
    address = given
    if given == "auto":
        found = running_cluster(current_cluster)
        if found is None:
            raise ServiceError(f"--ray-address auto: no Ray cluster was found; {_HOW_TO_START}")
        address = found
    if address.startswith("ray://"):
        raise ServiceError(
            f"Ray address {address}: Ray Client is not supported; run `legato serve` on a machine "
            f"of the cluster and give host:{DEFAULT_RAY_PORT}"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ServiceError(
            f"Ray address must be auto or host:port such as 127.0.0.1:{DEFAULT_RAY_PORT}, "
            f"got {address!r}"
        )
    return address


def probe_ray(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Checks that a Ray head answers at `address`.

    Raises:
        ServiceError: saying what is there instead.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise ServiceError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); {_HOW_TO_START}"
        ) from error
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/ray.rpc.NodeInfoGcsService/GetClusterId"
        )
        try:
            check(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            # A head with token authentication refuses us; `ray.init` will bring the token.
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return
            raise ServiceError(
                f"what listens at {address} is no Ray head ({error.code().name})"
            ) from error
