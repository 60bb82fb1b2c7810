"""RayAddress: which Ray cluster to join, and proof that one answers there, before Ray is asked.

`ray.init` with a dead address was seen to hang for more than four minutes; every check here is
bounded by a few seconds.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path

import grpc

from legato.cluster.errors import ServiceError

DEFAULT_RAY_PORT = 6379
PROBE_TIMEOUT_S = 5.0
# Where Ray looks for the token of a cluster that wants one, if no variable says otherwise.
_TOKEN_FILE = Path("~/.ray/auth_token")
_HOW_TO_START = (
    "start one with `ray start --head`, or leave out --ray-address to use a Ray of our own"
)


def current_cluster_file() -> Path:
    """Where `ray start` leaves the address of the cluster that this machine belongs to."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"


def running_cluster(current_cluster: Path | None = None) -> str | None:
    """The cluster that "auto" means: RAY_ADDRESS, else the one started on this machine.

    It may be dead: an address outlives its cluster.
    """
    if current_cluster is None:
        current_cluster = current_cluster_file()
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address and address != "auto":
        return address
    if current_cluster.is_file():
        return current_cluster.read_text().strip() or None
    return None


def resolve_ray_address(given: str, current_cluster: Path | None = None) -> str:
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
    if not host or re.fullmatch(r"\d{1,5}", port, re.ASCII) is None or not 0 < int(port) < 65536:
        raise ServiceError(
            f"Ray address must be auto or host:port such as 127.0.0.1:{DEFAULT_RAY_PORT}, "
            f"got {address!r}"
        )
    return address


def probe_ray(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Checks that a Ray head answers at `address`; True where it wants a token.

    Raises:
        ServiceError: saying what is there instead.
    """
    host, _, port = address.rpartition(":")
    try:
        _look_up(host.strip("[]"), int(port), timeout_s)
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
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return True
            raise ServiceError(
                f"what listens at {address} is no Ray head ({error.code().name})"
            ) from error
    return False


def _look_up(host: str, port: int, timeout_s: float) -> None:
    """Raises OSError where the name is not known, or nobody says so within `timeout_s`.

    The system's own look-up takes no bound, and name servers that are silent cost it half a minute.
    """
    failures: list[OSError] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if asking.is_alive():
        raise TimeoutError(f"no name server knew {host} within {timeout_s:g} s")
    if failures:
        raise failures[0]


def bring_token(address: str, token_file: Path = _TOKEN_FILE) -> None:
    """Has Ray show its token to a cluster that wants one. Must run before `ray` is imported.

    Raises:
        ServiceError: there is none to show; Ray itself would try for ever.
    """
    mode = os.environ.get("RAY_AUTH_MODE")
    has_token = (
        "RAY_AUTH_TOKEN" in os.environ
        or "RAY_AUTH_TOKEN_PATH" in os.environ
        or token_file.expanduser().is_file()
    )
    if mode not in (None, "token") or not has_token:
        raise ServiceError(
            f"the Ray cluster at {address} wants a token (RAY_AUTH_MODE is {mode or 'not set'}, "
            f"and a token is {'there' if has_token else 'not there'}): set RAY_AUTH_MODE=token "
            f"and RAY_AUTH_TOKEN, or copy the head's {token_file} to this machine"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
