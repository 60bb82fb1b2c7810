"""Ports of a service: where its routers are to listen, and whether they can."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from legato.cluster.config import ServiceConfig

MAX_PORT = 65535
HTTP_OFFSET = 1000  # so services that have ports of their own have HTTP ports of their own


def router_ports(config: ServiceConfig) -> list[int]:
    """Where the routers are to listen; 0 is any free port. WrongInputError: too few."""
    first, last = config.router.port, config.router.port + config.num_routers - 1
    if not first:
        return [0]
    if last > MAX_PORT:
        raise WrongInputError(
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
        needed = (
            f"the HTTP endpoint needs the port {first}"
            if len(ports) == 1
            else f"the HTTP endpoints of --routers {len(ports)} need the ports {first} to "
            f"{ports[-1]}"
        )
        raise WrongInputError(f"{needed}; the last port is {MAX_PORT}: choose with --http-port")
    if shared := set(ports).intersection(router_ports(config)):
        apart = "be another" if len(ports) == 1 else f"be {len(ports)} or more away"
        raise WrongInputError(
            f"port {min(shared)} is asked for twice, by --port and by --http-port: one of them "
            f"must {apart}"
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
        return f"port {port} on {host} is in use; choose another with --port{_or_stop(host, port)}"
    at = f"{host}:{port}" if port else host
    return f"{option}: cannot listen on {at}: {error.strerror}"


def _or_stop(host: str, port: int) -> str:
    """The other way out, where the occupant is a service that `legato stop` can end."""
    from legato.cluster.port_occupant import find_service  # only now: it takes a moment to load

    found = find_service(host, port)
    if found is None:
        return ""
    where, _, grpc_port = found.rpartition(":")
    option = f"--port {grpc_port}" if where == "127.0.0.1" else f"--address {found}"
    which = "the service there" if grpc_port == str(port) else "the service whose HTTP port it is"
    return f", or end {which} with `legato stop {option}`"
