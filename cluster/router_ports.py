"""router_ports, check_port: where a service is to listen, and whether it can."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.cluster.config import ServiceConfig

MAX_PORT = 65535


def router_ports(config: ServiceConfig) -> list[int]:
    """Where the routers are to listen; 0 is any free port. ServiceError where there are too few."""
    first, last = config.router.port, config.router.port + config.num_routers - 1
    if not first:
        return [0]
    if last > MAX_PORT:
        raise ServiceError(
            f"--routers {config.num_routers} needs the ports {first} to {last}; the last port is "
            f"{MAX_PORT}"
        )
    return list(range(first, last + 1))


def check_port(host: str, port: int, option: str = "--host") -> None:
    """Raises ServiceError where nobody can listen there. Port 0 means any free one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServiceError(f"{option} {host}: {error.strerror}") from error
    with socket.socket(family, kind, proto) as probe:
        # As servers do it: connections that linger do not count, listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ServiceError(_port_problem(host, port, option, error)) from error


def _port_problem(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == 98:  # EADDRINUSE
        return (
            f"port {port} on {host} is in use; choose another with --port, or end the service "
            f"there with `legato stop --port {port}`"
        )
    at = f"{host}:{port}" if port else host
    return f"{option}: cannot listen on {at}: {error.strerror}"
