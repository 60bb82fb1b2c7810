"""make_certs: a certificate authority for development, and certificates of it for each part."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from legato.protos.internal_access import ROUTER_NAME, WORKER_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CA_DAYS = 3650
LEAF_DAYS = 398  # what browsers and many libraries take at most
_BACKDATED = datetime.timedelta(minutes=5)  # clocks differ
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class _Leaf:
    name: str  # of its two files
    names: tuple[str, ...]  # DNS names and addresses
    serves: bool


def make_certs(folder: Path, hosts: Sequence[str] = (), days: int = LEAF_DAYS) -> list[Path]:
    """Writes ca, service, worker and client, each as .pem and .key; keys are for the owner alone.
    `hosts`: DNS names and addresses at which clients reach the service, beside loopback.

    Raises:
        ValueError: a host that is none, or `days` beyond the authority's own.
        FileExistsError: one of the files is there; none is written then.
        OSError: the folder cannot be written to.
    """
    if not 1 <= days <= CA_DAYS:
        raise ValueError(f"days is {days}, limit [1, {CA_DAYS}]")
    public = tuple(dict.fromkeys((*LOOPBACK, *hosts)))
    leaves = (
        _Leaf("service", (ROUTER_NAME, *public), serves=True),
        _Leaf("worker", (WORKER_NAME, *LOOPBACK), serves=True),
        _Leaf("client", (), serves=False),
    )
    for host in hosts:
        if host.lower() in (ROUTER_NAME, WORKER_NAME):
            raise ValueError(f"host is {host!r}, which is an internal name and no host's")
        _san(host)
    paths = [folder / f"{name}{end}" for name in _names(leaves) for end in (".pem", ".key")]
    there = [path for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise FileExistsError(f"{there[0]} is there already: nothing was written")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key)
    _write(folder / "ca", ca, ca_key)
    for leaf in leaves:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(folder / leaf.name, _signed(leaf, key, ca, ca_key, days), key)
    return paths


def _names(leaves: Sequence[_Leaf]) -> list[str]:
    return ["ca", *(leaf.name for leaf in leaves)]


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _subject("Legato development CA")
    usage = _key_usage(signs_certificates=True)
    return (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _signed(
    leaf: _Leaf,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    # Routers and workers are clients of workers, too.
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if leaf.serves:
        uses.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    builder = (
        _builder(_subject(f"Legato {leaf.name}"), ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if leaf.names:
        names = x509.SubjectAlternativeName([_san(name) for name in leaf.names])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if len(host) > 253 or not all(
        0 < len(label) <= 63 and label.isascii() and label.replace("-", "").isalnum()
        for label in labels
    ):
        raise ValueError(f"host is {host!r}, limit a DNS name or an address, without a port")
    return x509.DNSName(host)


def _write(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for path, data, mode in ((f"{stem}.key", secret, 0o600), (f"{stem}.pem", pem, 0o644)):
        # O_EXCL: what somebody put there meanwhile, a link too, is not written through.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
