"""Connection: how a command reaches the service, and what it says where that fails."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

DEFAULT_PORT = 50051
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="LEGATO_ADDRESS",
        help=f"Where the service listens, host:port. Default 127.0.0.1:{DEFAULT_PORT}.",
        show_default=False,
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="Short for --address 127.0.0.1:PORT."),
]


def choose_address(address: str | None, port: int | None) -> str:
    """host:port from the two options."""
    if port is not None:
        return f"127.0.0.1:{port}"
    if address is None:
        return f"127.0.0.1:{DEFAULT_PORT}"
    host, _, number = address.rpartition(":")
    if not host or not number.isdigit() or not 0 < int(number) < 65536:
        raise typer.BadParameter(f"must be host:port, got {address!r}", param_hint="--address")
    return address


def is_open(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """True where something accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


@contextmanager
def connect(address: str) -> Iterator[grpc.Channel]:
    """A channel; within the block, gRPC errors become ServiceErrors of one sentence.

    Raises:
        ServiceError: nothing listens, or a call failed.
    """
    import grpc

    if not is_open(address):
        raise ServiceError(
            f"no service answers at {address}; start one with `legato serve --model …`, or say "
            "where it is with --address"
        )
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise ServiceError(_sentence(error, address)) from error


def _sentence(error: grpc.RpcError, address: str) -> str:
    import grpc

    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not is_open(address):
        return f"the service at {address} is gone"
    if code is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details:
        return f"what listens at {address} is no Legato service"
    return f"{code.name}: {details}" if details else str(code.name)
