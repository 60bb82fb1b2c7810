"""run_service: a service's life in the terminal, as `legato serve` and `legato demo` have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.cli.connection import CALL_TIMEOUT_S, DEFAULT_PORT, connect
from legato.cluster.cli.kv_capacity import kv_lines
from legato.cluster.cli.progress import TerminalProgress
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.client_access import ClientAccess
    from legato.cluster.config import ServiceConfig
    from legato.cluster.owner import Owner


def run_service(
    config: ServiceConfig, while_ready: Callable[[Owner, str, TerminalProgress], float | None]
) -> int:
    """Starts, calls `while_ready(owner, addresses, progress)`, and ends everything in any case.

    `while_ready` returns how long running requests have, or None for no drain. Returns the exit
    code.
    """
    from legato.cluster.owner import Owner
    from legato.cluster.stop_signal import StartInterruptedError, StopSignal

    with StopSignal() as stop:
        progress = TerminalProgress()
        owner = Owner(config, progress, stop)
        drain_timeout_s: float | None = None
        because = ""
        try:
            address = owner.start()
            progress.close()
            drain_timeout_s = while_ready(owner, address, progress)
        except StartInterruptedError:
            progress.stage("interrupted")
            return 130
        except ServiceError as error:
            because = str(error)
            raise
        finally:
            owner.end(drain_timeout_s, because)
            progress.close()
        progress.stage("ended")
        return 0


def stay(owner: Owner, address: str, progress: TerminalProgress) -> float:
    """For `run_service`: tells where the service is and what it holds, and waits for its end."""
    from legato.cluster.heartbeat import dial_address

    first = address.partition(",")[0]
    for line in _kv_lines(first, owner.access):
        progress.stage(line)
    progress.stage(f"ready at {address}")
    if http := owner.http_addresses:
        scheme = "http" if owner.access.tls is None else "https"
        urls = [f"{scheme}://{dial_address(at)}/" for at in http]
        progress.stage(f"OpenAI-compatible HTTP at {', '.join(f'{url}v1' for url in urls)}")
        progress.stage(f"live page at {', '.join(urls)}")
    progress.stage(
        f'try: legato generate "Why is the sky blue?"{_access_words(owner, address)}   '
        "(Ctrl-C ends the service)"
    )
    return owner.wait()


def _access_words(owner: Owner, address: str) -> str:
    """What a command of this machine must be told to reach it; `…` for what only clients have."""
    words = [] if address == f"127.0.0.1:{DEFAULT_PORT}" else ["--address", address]
    tls, token_file = owner.public_access
    if tls is not None and tls.ca_file is not None:
        words += ["--tls-ca", tls.ca_file, "--tls-cert", "…", "--tls-key", "…"]
    elif tls is not None:
        words += ["--tls-ca", "…"]
    if token_file is not None:
        words += ["--token-file", token_file]
    return "".join(f" {word}" for word in words)


def _kv_lines(address: str, access: ClientAccess) -> list[str]:
    from legato.cluster.heartbeat import dial_address
    from legato.protos import generation_pb2, generation_pb2_grpc

    try:
        with connect(dial_address(address), access) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            model = stub.GetModel(generation_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S)
    except ServiceError as error:  # the service may do well all the same
        return [f"KV cache: not known ({error})"]
    return kv_lines(model)
