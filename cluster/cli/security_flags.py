"""What `legato serve` takes for TLS and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.protos.tls_files import TlsFiles


def _file(help_text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        dir_okay=False, resolve_path=True, help=help_text, show_default=False
    )
    return option


TlsCertOption = Annotated[
    Path | None, _file("The service's TLS certificate, PEM, with the chain behind it.")
]
TlsKeyOption = Annotated[Path | None, _file("Its key. Never leaves this machine.")]
TlsCaOption = Annotated[
    Path | None,
    _file(
        "Who signs the certificates that clients must show; routers and workers, too, speak TLS "
        "to each other then. `legato certs` makes a set."
    ),
]
WorkerTlsCertOption = Annotated[
    Path | None,
    _file("The workers' certificate, at this path on their machines. Default: that of --tls-cert."),
]
WorkerTlsKeyOption = Annotated[Path | None, _file("Its key.")]
ApiTokenFileOption = Annotated[
    Path | None,
    _file(
        "Clients must show one of the tokens in this file, one a line. It is read anew when it "
        "changes: add the new token, change the clients, take the old one out."
    ),
]
AllowPlainTokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-plain-token", help="Take tokens from other machines without TLS, all the same."
    ),
]


def tls_files(
    cert: Path | None, key: Path | None, ca: Path | None, prefix: str = "--tls"
) -> TlsFiles | None:
    """Raises BadParameter where one is given without the other."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        missing, given = (
            (f"{prefix}-cert", f"{prefix}-key" if key else f"{prefix}-ca")
            if cert is None
            else (f"{prefix}-key", f"{prefix}-cert")
        )
        raise typer.BadParameter(f"{missing} is missing where {given} is given", param_hint=missing)
    return TlsFiles(str(cert), str(key), None if ca is None else str(ca))
