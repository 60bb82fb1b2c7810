"""`legato certs`: certificates to try TLS with."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

from legato.cluster.errors import ServiceError, WrongInputError


def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where they go; made where absent.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address at which clients reach the service, beside loopback; may be "
            "given again."
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are good.")] = 398,
) -> None:
    """Make a certificate authority for development, and certificates of it for a service, its
    workers and its clients. Overwrites nothing. Whoever has DIR/ca.key can make more: keep it away
    from the machines that serve.

    Examples:

        legato certs ./certs

        legato certs ./certs --host llm.example.com --host 10.0.0.5
    """
    from legato.cluster.dev_certs import make_certs

    try:
        paths = make_certs(folder, host or (), days)
    except ValueError as error:
        raise WrongInputError(f"--{error}") from error
    except FileExistsError as error:
        raise ServiceError(str(error)) from error
    except OSError as error:
        raise ServiceError(f"cannot write to {folder}: {error.strerror}") from error
    for path in paths:
        print(path)
    serve = f"--tls-cert {folder}/service.pem --tls-key {folder}/service.key"
    worker = f"--worker-tls-cert {folder}/worker.pem --worker-tls-key {folder}/worker.key"
    client = f"--tls-cert {folder}/client.pem --tls-key {folder}/client.key"
    ca = f"--tls-ca {folder}/ca.pem"
    print(f"\nlegato serve --model demo {ca} {serve} {worker}")
    print(f"legato generate Hello {ca} {client}")
