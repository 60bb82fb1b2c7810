"""`legato certs`: what the files hold, who may read them, and that none is ever overwritten."""

from __future__ import annotations

import datetime
import ipaddress
import stat
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from legato.cluster.dev_certs import CA_DAYS, LEAF_DAYS, make_certs
from legato.protos.internal_access import ROUTER_NAME, WORKER_NAME
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

LEAVES = ("service", "worker", "client")


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    try:
        found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    addresses = found.value.get_values_for_type(x509.IPAddress)
    return {*found.value.get_values_for_type(x509.DNSName), *map(str, addresses)}


def test_keys_are_for_their_owner_alone_and_fit_their_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    paths = make_certs(folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o600 if path.suffix == ".key" else mode & 0o022 == 0
    for leaf in ("ca", *LEAVES):
        TlsFiles(str(folder / f"{leaf}.pem"), str(folder / f"{leaf}.key")).check()
    with pytest.raises(ValueError, match="do not fit each other"):
        TlsFiles(str(folder / "client.pem"), str(folder / "worker.key")).check()


def test_who_may_be_what_stands_in_the_names(tmp_path: Path) -> None:
    make_certs(tmp_path, ["llm.example.com", "10.0.0.5", "2001:db8::1", "*.example.org"])
    public = {"localhost", "127.0.0.1", "::1"}
    asked = {"llm.example.com", "10.0.0.5", "2001:db8::1", "*.example.org"}
    assert names(tmp_path / "service.pem") == public | asked | {ROUTER_NAME}
    assert names(tmp_path / "worker.pem") == public | {WORKER_NAME}
    assert names(tmp_path / "client.pem") == set()


def test_certificates_are_signed_bounded_in_time_and_can_sign_nothing(tmp_path: Path) -> None:
    make_certs(tmp_path)
    ca = certificate(tmp_path / "ca.pem")
    now = datetime.datetime.now(datetime.UTC)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert ca.not_valid_after_utc - now < datetime.timedelta(days=CA_DAYS + 1)
    for leaf in LEAVES:
        made = certificate(tmp_path / f"{leaf}.pem")
        made.verify_directly_issued_by(ca)
        assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert made.not_valid_before_utc < now
        lasts = made.not_valid_after_utc - now
        assert datetime.timedelta(days=LEAF_DAYS - 1) < lasts <= datetime.timedelta(days=LEAF_DAYS)
        uses = set(made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        assert ExtendedKeyUsageOID.CLIENT_AUTH in uses
        assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) == (leaf != "client")


@pytest.mark.parametrize("name", ["ca.key", "client.pem", "worker.key"])
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=name):
        make_certs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_no_link_is_written_through(tmp_path: Path) -> None:
    folder, target = tmp_path / "certs", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "ca.key").symlink_to(target)
    with pytest.raises(FileExistsError):
        make_certs(folder)
    assert not target.exists()


@pytest.mark.parametrize(
    "host",
    ["", "a b", "host:443", "http://x", "é.example", "a..b", WORKER_NAME, ROUTER_NAME.upper()],
)
def test_a_wrong_host_is_named_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="host is "):
        make_certs(tmp_path, [host])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("days", [0, -1, CA_DAYS + 1])
def test_days_are_bounded_by_the_authoritys_own(tmp_path: Path, days: int) -> None:
    with pytest.raises(ValueError, match=rf"days is {days}, limit \[1, {CA_DAYS}\]"):
        make_certs(tmp_path, days=days)


def test_addresses_are_addresses_and_no_names(tmp_path: Path) -> None:
    make_certs(tmp_path, ["192.0.2.1"])
    found = certificate(tmp_path / "service.pem").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert ipaddress.ip_address("192.0.2.1") in found.value.get_values_for_type(x509.IPAddress)
    assert "192.0.2.1" not in found.value.get_values_for_type(x509.DNSName)
