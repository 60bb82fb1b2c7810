"""What the benchmark's processes are told of certificates and secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos.internal_access import InternalAccess
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of every process."""
    parser.add_argument("--certs", help="a folder that `legato certs` made, for engine and router")
    parser.add_argument("--secret", default="", help="what the engine asks its callers for")


def inner_access(certs: str | None, name: str, secret: str) -> InternalAccess:
    """Of the process that has the certificate `name`."""
    return InternalAccess(tls_files(certs, name), secret)


def tls_files(certs: str | None, name: str) -> TlsFiles | None:
    """None without a folder."""
    if certs is None:
        return None
    return TlsFiles(f"{certs}/{name}.pem", f"{certs}/{name}.key", f"{certs}/ca.pem")
