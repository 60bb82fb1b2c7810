"""Ports of a service: where its routers are to listen, and whether they can."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.cluster.config import ServiceConfig

MAX_PORT = 65535
HTTP_OFFSET = 1000  # so services that have ports of their own have HTTP ports of their own


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


def default_http_port(port: int) -> int:
    """Of a service at `port`, where nothing is said of HTTP."""
    return port and port + HTTP_OFFSET


def http_ports(config: ServiceConfig) -> list[int]:
    """The same of their HTTP endpoints; none where there are none."""
    first = config.router.http_port
    if first is None:
        return []
    if not first:
        return [0]
    ports = list(range(first, first + config.num_routers))
    if ports[-1] > MAX_PORT:
        raise ServiceError(
            f"the HTTP endpoints of --routers {config.num_routers} need the ports {first} to "
            f"{ports[-1]}; the last port is {MAX_PORT}: choose others with --http-port"
        )
    if shared := set(ports).intersection(router_ports(config)):
        raise ServiceError(
            f"port {min(shared)} is asked for twice, by --port and by --http-port; they must be "
            f"{config.num_routers} apart"
        )
    return ports


def check_port(
    host: str, port: int, option: str = "--host", *, port_option: str = "--port"
) -> None:
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
            raise ServiceError(_port_problem(host, port, option, port_option, error)) from error


def _port_problem(host: str, port: int, option: str, port_option: str, error: OSError) -> str:
    if error.errno == 98:  # EADDRINUSE
        if port_option != "--port":
            return f"port {port} on {host} is in use; choose another with {port_option}"
        return (
            f"port {port} on {host} is in use; choose another with --port, or end the service "
            f"there with `legato stop --port {port}`"
        )
    at = f"{host}:{port}" if port else host
    return f"{option}: cannot listen on {at}: {error.strerror}"
