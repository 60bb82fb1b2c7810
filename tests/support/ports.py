"""Ports for tests: below those that the system gives to whoever asks for any."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

RANGE = range(20_000, 30_000)
HTTP_OFFSET = 1000  # a service's HTTP port is so far above its gRPC port, if nobody says otherwise
MAX_ROUTERS = 3  # of a test's service; each takes the next port


def free_ports(count: int) -> list[str]:
    """All different."""
    found: list[str] = []
    for port in random.sample(RANGE, 1000):
        if _is_free(port):
            found.append(str(port))
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free")


def service_port() -> str:
    """Of a service: with it, the ports of its other routers and those for HTTP are free. A router
    that comes back finds them free again, which is not sure of a port that the system gave: any
    connection of any process may have got it meanwhile.
    """
    own = [at + number for at in (0, HTTP_OFFSET) for number in range(MAX_ROUTERS)]
    for port in random.sample(RANGE, 1000):
        if all(_is_free(port + offset) for offset in own):
            return str(port)
    raise RuntimeError("no port is free with those beside it")


def _is_free(port: int) -> bool:
    with socket.socket() as trial, suppress(OSError):
        trial.bind(("", port))
        return True
    return False
