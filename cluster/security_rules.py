"""What of TLS, tokens and addresses goes together, and what a service's parts are told of it."""

from __future__ import annotations

import datetime
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from legato.cluster.client_access import ClientAccess, ClientTls, is_loopback, read_token
from legato.cluster.credentials import read_tokens
from legato.protos.internal_access import ROUTER_NAME, WORKER_NAME, InternalAccess

if TYPE_CHECKING:
    from cryptography import x509

    from legato.cluster.config import RouterOptions, ServiceConfig
    from legato.protos.tls_files import TlsFiles

SOON = datetime.timedelta(days=14)
_HOW = "`legato certs DIR` makes such a set"


def check_security(config: ServiceConfig) -> list[str]:
    """What a person should know of the service that is about to start.

    Raises:
        ValueError: naming what is wrong, and the way out.
    """
    options, notes = config.router, []
    tls, worker_tls = options.tls, config.worker_tls
    if tls is not None:
        tls.check()
        notes += _check_age(tls)
        _own_tls(tls)
    if worker_tls is not None and (tls is None or tls.ca_file is None):
        raise ValueError(
            "--worker-tls-cert needs --tls-cert, --tls-key and --tls-ca: workers and routers prove "
            "to each other who they are"
        )
    if tls is not None and tls.ca_file is not None:
        _check_name(tls, ROUTER_NAME, "--tls-cert")
        option = "--tls-cert" if worker_tls is None else "--worker-tls-cert"
        own = worker_tls or tls
        if Path(own.cert_file).exists():  # workers may be on other machines alone
            own.check()
            _check_name(own, WORKER_NAME, option)
            notes += _check_age(own) if own is not tls else []
    is_open = not is_loopback(f"{options.host}:0")
    if options.token_file is not None:
        if not read_tokens(options.token_file):
            raise ValueError(
                f"token file {options.token_file!r} has no token; `openssl rand -hex 32` makes one"
            )
        if is_open and tls is None and not config.allow_plain_token:
            raise ValueError(
                f"tokens would come to {options.host} in plain, where others may read them: use "
                "--tls-cert and --tls-key, or allow it with --allow-plain-token"
            )
    elif is_open and (tls is None or tls.ca_file is None):
        notes.append(
            f"there is no authentication: whoever reaches {options.host} may use and stop this "
            "service (--api-token-file, --tls-ca)"
        )
    return notes


def inner_access(config: ServiceConfig) -> tuple[InternalAccess, InternalAccess]:
    """The routers' and the workers', with a new secret."""
    secret, tls = secrets.token_hex(32), config.router.tls
    if tls is None or tls.ca_file is None:
        return InternalAccess(secret=secret), InternalAccess(secret=secret)
    workers = replace(config.worker_tls or tls, ca_file=tls.ca_file)
    return InternalAccess(tls, secret), InternalAccess(workers, secret)


def own_access(options: RouterOptions) -> ClientAccess:
    """For the service's own process, which asks its routers on whatever address they listen."""
    tls = options.tls
    return ClientAccess(
        token=None if options.token_file is None else read_token(options.token_file),
        tls=None if tls is None else _own_tls(tls),
        allow_plain_token=True,  # it stays on this machine
    )


def _own_tls(tls: TlsFiles) -> ClientTls:
    if tls.ca_file is not None:
        return ClientTls(tls.ca_file, tls.cert_file, tls.key_file, ROUTER_NAME)
    names = _names(_certificate(tls.cert_file))
    if not names:
        raise ValueError(f"TLS certificate {tls.cert_file!r} has no subject alternative name")
    # Trusted as it stands: it was just read from our own disk.
    return ClientTls(ca_file=tls.cert_file, server_name=names[0].replace("*", "a", 1))


def _check_name(tls: TlsFiles, name: str, option: str) -> None:
    if name not in _names(_certificate(tls.cert_file)):
        raise ValueError(
            f"{option} {tls.cert_file!r} has no DNS name {name}, by which routers and workers "
            f"know each other; {_HOW}"
        )


def _check_age(tls: TlsFiles) -> list[str]:
    ends = _certificate(tls.cert_file).not_valid_after_utc
    left = ends - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(0):
        raise ValueError(f"TLS certificate {tls.cert_file!r} ended on {ends:%Y-%m-%d}")
    return [f"TLS certificate {tls.cert_file} ends on {ends:%Y-%m-%d}"] if left < SOON else []


def _certificate(path: str) -> x509.Certificate:
    from cryptography import x509  # takes a moment, and only TLS needs it

    return x509.load_pem_x509_certificates(Path(path).read_bytes())[0]


def _names(certificate: x509.Certificate) -> list[str]:
    """DNS names first."""
    from cryptography import x509

    try:
        san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *san.get_values_for_type(x509.DNSName),
        *map(str, san.get_values_for_type(x509.IPAddress)),
    ]
