"""Connection: how a command reaches the service, and what it says where that fails."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cluster.cli.client_flags import chosen_access, name_sources
from legato.cluster.client_target import parse_addresses
from legato.cluster.error_reasons import Reason
from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from legato.cluster.client import Client
    from legato.cluster.client_access import ClientAccess

DEFAULT_PORT = 50051
CONNECT_TIMEOUT_S = 5.0
# Of several routers, for one that has the connection to say something: it may hang.
GREETING_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 10.0
HANDSHAKE_POLL_S = 0.005
HEALTH_METHOD = "/grpc.health.v1.Health/Check"  # open to all; an empty message asks for the whole
NO_CONNECTION = "failed to connect to all addresses"  # gRPC's words

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="LEGATO_ADDRESS",
        help="Where the service listens, host:port; of several routers with commas between them. "
        f"Default 127.0.0.1:{DEFAULT_PORT}.",
        show_default=False,
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="Short for --address 127.0.0.1:PORT."),
]


def choose_address(address: str | None, port: int | None) -> str:
    """host:port from the two options, or several with commas between them."""
    if port is not None:
        return f"127.0.0.1:{port}"
    if address is None:
        return f"127.0.0.1:{DEFAULT_PORT}"
    try:
        return ",".join(parse_addresses(address))
    except ValueError:
        raise typer.BadParameter(
            f"must be host:port, or several with commas between them, got {address!r}",
            param_hint=source_of("--address", "LEGATO_ADDRESS", address),
        ) from None


def source_of(option: str, variable: str, value: str) -> str:
    """Where a value that is wrong was read, for who has to mend it there."""
    return variable if os.environ.get(variable) == value else option


def is_open(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """True where something accepts connections; of several addresses, at one of them."""
    for target in address.split(","):
        host, _, port = target.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        except (OSError, UnicodeError):  # the latter: it can be no host's name
            continue
        return True
    return False


def open_targets(address: str) -> list[str]:
    """Of several routers, those that are there.

    Raises:
        ServiceError: nothing listens.
    """
    targets = [target for target in address.split(",") if is_open(target)]
    if not targets:
        raise _nobody(address)
    return targets


@contextmanager
def connect(address: str, access: ClientAccess | None = None) -> Iterator[grpc.Channel]:
    """A channel to the first router that is there and does not hang; within the block, gRPC errors
    become ServiceErrors of one sentence. `access`: by default what the command was told.

    Raises:
        ServiceError: nothing listens, or a call failed.
    """
    access = access or chosen_access()
    targets = open_targets(address)
    while True:
        target = targets.pop(0)
        with _channel(target, access) as channel:
            if targets and not _is_greeted(channel):
                continue
            with sentences(target):
                yield channel
            return


def _channel(target: str, access: ClientAccess) -> grpc.Channel:
    from legato.cluster.client_channels import CHANNEL_OPTIONS

    try:
        return access.channel(target, CHANNEL_OPTIONS)
    except ValueError as error:
        raise WrongInputError(name_sources(str(error))) from error


def _is_greeted(channel: grpc.Channel) -> bool:
    """A process that is stopped still has connections made, by its kernel, and says nothing."""
    import grpc

    ready = grpc.channel_ready_future(channel)
    try:
        ready.result(timeout=GREETING_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        ready.cancel()
        return False
    return True


@contextmanager
def connect_client(address: str) -> Iterator[Client]:
    """As `connect`, for streams, which go on at another router where one is lost."""
    from legato.cluster.client import Client

    if not is_open(address):
        raise _nobody(address)
    access = chosen_access()
    try:
        client = Client(address, access=access)
    except ValueError as error:
        raise WrongInputError(name_sources(str(error))) from error
    with sentences(address), client:
        _check_handshake(address.split(","), access)
        yield client


def _check_handshake(targets: list[str], access: ClientAccess) -> None:
    """Raises what a connection fails by where none comes about with any of them, such as without
    TLS: the client takes that for an outage, and would wait for its end.
    """
    import grpc

    with ExitStack() as channels:
        bare = replace(access, token=None)  # health is open to all: nothing is shown for it
        calls = [_ask_health(channels.enter_context(_channel(to, bare))) for to in targets]
        deadline_s = time.monotonic() + GREETING_TIMEOUT_S
        while time.monotonic() < deadline_s:
            failed = [call.exception() for call in calls if call.done()]
            if not all(error is not None and _is_no_connection(error) for error in failed):
                return
            if len(failed) == len(calls):
                break
            time.sleep(HANDSHAKE_POLL_S)
        else:
            return  # one hangs, which is the client's to see
    open_now = [error for target, error in zip(targets, failed, strict=True) if is_open(target)]
    if open_now and isinstance(open_now[0], grpc.RpcError):
        raise open_now[0]


def _ask_health(channel: grpc.Channel) -> Any:  # noqa: ANN401  # gRPC has no public name for it
    check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
    return check.future(b"", timeout=GREETING_TIMEOUT_S)


def _is_no_connection(error: BaseException) -> bool:
    import grpc

    return (
        isinstance(error, grpc.RpcError)
        and error.code() is grpc.StatusCode.UNAVAILABLE
        and NO_CONNECTION in (error.details() or "")
    )


def _nobody(address: str) -> ServiceError:
    return ServiceError(
        f"no service answers at {address}; start one with `legato serve --model …`, or say "
        "where it is with --address"
    )


@contextmanager
def sentences(address: str) -> Iterator[None]:
    """Within the block gRPC errors become ServiceErrors of one sentence."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details():
            raise WrongInputError(_with_options(error.details() or "")) from error
        raise ServiceError(_sentence(error, address)) from error


def reason_of(error: grpc.RpcError) -> str:
    """The service's, for programs; empty where it has said none."""
    from legato.cluster.client_errors import CallFailedError
    from legato.cluster.retry_policy import failure_of

    return error.reason if isinstance(error, CallFailedError) else failure_of(error).reason


def _with_options(details: str) -> str:
    """Fields of a request by the names of the options that they come from."""
    named = re.sub(r"\b(?:sampling\.)?guide\.(?=json_schema|regex|choice)", "sampling.", details)
    return re.sub(
        r"\bsampling\.(\w+)(?:\.texts)?(?:\[\d+\])?",
        lambda found: "--" + found[1].replace("_", "-"),
        named,
    )


def _sentence(error: grpc.RpcError, address: str) -> str:
    import grpc

    from legato.cluster.retry_policy import speaks_http1

    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and details.startswith("the deadline of "):
        return details  # of the client's own, in a sentence
    if reason_of(error) == Reason.SHUTTING_DOWN.name:  # and not only gone: it was ended
        return f"the service at {address} was told to end: {details}"
    if code is grpc.StatusCode.UNAVAILABLE and not is_open(address):
        return f"the service at {address} is gone"
    if speaks_http1(code, details):
        return _web_server(address)
    if code is grpc.StatusCode.UNAVAILABLE and NO_CONNECTION in details:
        tls = chosen_access().tls
        trouble = details.rpartition("last error: ")[2]
        return f"something listens at {address}, and no connection comes about ({trouble}); " + (
            "it may want TLS (--tls-ca, or --tls)"
            if tls is None
            else "it may want a certificate (--tls-cert), have one that --tls-ca did not "
            "sign, or speak no TLS"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details:
        return f"what listens at {address} is no Legato service"
    return f"{code.name}: {details}" if details else str(code.name)


def _web_server(address: str) -> str:
    """What to say where HTTP/1 is spoken; with the right port where it is a service of ours."""
    import httpx2

    tls = chosen_access().tls
    for target in address.split(","):
        scheme = "http" if tls is None else "https"
        verify = True if tls is None else tls.ssl_context()
        try:
            with httpx2.Client(verify=verify, trust_env=False, timeout=GREETING_TIMEOUT_S) as web:
                port = int(web.get(f"{scheme}://{target}/health").json()["grpc_port"])
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            continue
        host = target.rpartition(":")[0]
        return (
            f"{target} is the HTTP endpoint of a Legato service; this command speaks gRPC, which "
            f"is at {host}:{port}: --address {host}:{port}"
        )
    return f"what listens at {address} is a web server and speaks no gRPC"
